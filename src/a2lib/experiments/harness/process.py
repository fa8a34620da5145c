"""A worker process seen from the notebook: tasks out, events in, no hang and no orphan."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from a2lib.errors import OneLine
from a2lib.experiments.harness.worker import HERE
from a2lib.paths import cache_dir

START_TIMEOUT_S = 180
EXIT_TIMEOUT_S = 20
# What a process does not do to itself.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerDied(OneLine, RuntimeError):
    """The worker ended or was ended before it had finished its task; ``status`` is that of the row
    that the message is the note of. Where somebody ended it, ``from_outside``, it says nothing
    about the task."""

    def __init__(self, message: str, from_outside: bool = False, status: str = "error") -> None:
        super().__init__(message)
        self.from_outside, self.status = from_outside, status


class Worker:
    """A process that does what ``worker`` says, ready once it can call ``handler``,
    "module:function"."""

    ranks: object = None  # those that work together; None is one process

    def __init__(self, handler: str) -> None:
        self.ready = self.closed = False
        self._closing = threading.Lock()
        self._events: queue.Queue[dict | None] = queue.Queue()  # None: there will be no more
        self._start(handler)

    def ask(self, task: dict, silence_s: float) -> Iterator[dict]:
        """Send ``task`` and yield its events.

        Raises WorkerDied when the process ends before it is done, or, having killed it, when it
        says nothing for ``silence_s`` seconds.
        """
        try:
            if not self.ready:
                while not self._next(START_TIMEOUT_S).get("ready"):
                    pass
                self.ready = True
            try:
                self._send(json.dumps(task) + "\n")
            except (OSError, ValueError):
                raise self._died() from None
            while not (event := self._next(silence_s)).get("done"):
                yield event
        except BaseException:
            # Interrupted, here or where the events are used: what it says next would be taken for
            # the answer to the next task.
            self.close()
            raise

    def close(self) -> None:
        """End the process and everything it started; safe to call again, and from any thread."""
        with self._closing:
            if not self.closed:
                self.closed = True
                self._end()

    def _next(self, silence_s: float) -> dict:
        try:
            event = self._events.get(timeout=silence_s)
        except queue.Empty:
            raise self._died(f"no answer within {silence_s:g} s") from None
        if event is None:
            raise self._died()
        return event

    def _start(self, handler: str) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", HERE, handler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
            start_new_session=True,  # so that its compiler processes end with it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._events.put(json.loads(line))
        self._events.put(None)

    def _send(self, line: str) -> None:
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _died(self, silent: str = "") -> WorkerDied:
        """Why it ended; having ended it, where it is ``silent``."""
        code = None
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=EXIT_TIMEOUT_S)
        with self._closing:
            last = [] if self.closed else self._last_words()
        self.close()
        if code is None:  # it may have closed its output and hang on the way out
            return WorkerDied(silent or "its process stopped answering")
        what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerDied(": ".join([f"its process died ({what})", *last]), -code in OUTSIDE)

    def _last_words(self) -> list[str]:
        self._errors.seek(0)
        return self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()[-1:]

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def environment() -> dict[str, str]:
    """The environment of every worker: compiled code goes where the next one, and the next run of
    the notebook, finds it."""
    cache = cache_dir()
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # Inductor's own pool of compiler processes would start for each worker, and then idle on
        # the cores beside the timed calls.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "TRITON_INTERPRET": "0",
    }
