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
import time
from collections.abc import Iterator, Sequence

from a2lib.errors import OneLine
from a2lib.experiments.harness import compiler
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.worker import OUTSIDE
from a2lib.measure import memory
from a2lib.paths import cache_dir

START_TIMEOUT_S = 180
EXIT_TIMEOUT_S = 20
# How often to look at the free memory, while a worker is at work.
LOOK_S = 1.0


def command(handler: str) -> tuple[str, ...]:
    """The command of a worker that is ready once it can call ``handler``, "module:function"."""
    return (sys.executable, "-m", "a2lib.experiments.harness.worker", handler)


class WorkerDied(OneLine, RuntimeError):
    """The worker ended or was ended before it had finished its task. ``signal`` is what killed it,
    None if it ended by itself, ``stuck`` whether it was ended here for its silence, and
    ``no_memory`` why the system is thought to have killed it for want of memory, "" if nothing
    says so."""

    def __init__(
        self, message: str, signal: int | None = None, stuck: bool = False, no_memory: str = ""
    ) -> None:
        super().__init__(message)
        self.signal = signal
        self.stuck = stuck
        self.no_memory = no_memory

    @property
    def from_outside(self) -> bool:
        """Whether somebody ended it: it says nothing about the task."""
        return self.signal in OUTSIDE and not self.no_memory


class Worker:
    """A process that runs ``command`` and speaks the protocol of ``worker``: one that measures, or
    one that has ``ranks`` measure; use as a context manager.

    Ranks are in sessions of their own, so whoever started them is left ``end_s`` seconds to end
    them, and then itself, once its standard input ends.
    """

    def __init__(
        self, command: Sequence[str], ranks: Ranks | None = None, end_s: float = 0.0
    ) -> None:
        self.ranks, self._end_s = ranks, end_s
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
            start_new_session=True,  # so that its compiler processes end with it
        )
        self._memory = memory.Watch()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ready = False
        self._closing = threading.Lock()

    def ask(self, task: dict, silence_s: float) -> Iterator[dict]:
        """Send ``task`` and yield its events.

        Raises WorkerDied when the process ends before it is done, or, having killed it, when it
        says nothing for ``silence_s`` seconds.
        """
        try:
            if not self.ready:
                self._next(START_TIMEOUT_S)
                self.ready = True
            try:
                self._process.stdin.write(json.dumps(task) + "\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                raise self._died() from None
            while not (event := self._next(silence_s)).get("done"):
                yield event
        except BaseException:
            # Interrupted, here or where the events are used: what it says next would be taken for
            # the answer to the next task.
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._errors.closed

    def close(self) -> None:
        """End the process and everything it started; safe to call again, and from any thread."""
        with self._closing:
            if self._errors.closed:
                return
            if self._end_s:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._end_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, silence_s: float) -> dict:
        deadline = time.monotonic() + silence_s
        while True:
            self._memory.look()
            left = deadline - time.monotonic()
            try:
                line = self._lines.get(timeout=max(0.0, min(left, LOOK_S)))
                break
            except queue.Empty:
                if left > LOOK_S:
                    continue
            self.close()
            raise WorkerDied(f"no answer within {silence_s:g} s", stuck=True)
        if line is None:
            raise self._died()
        return json.loads(line)

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _died(self) -> WorkerDied:
        try:
            code = self._process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # It has closed its output and hangs on the way out.
            self.close()
            return WorkerDied("its process stopped answering", stuck=True)
        with self._closing:
            last = [] if self._errors.closed else self._last_words()
        self.close()
        by = -code if code < 0 else None
        what = f"killed by {signal.Signals(by).name}" if by else f"exit code {code}"
        reason = self._memory.reason() if by == signal.SIGKILL else ""
        said = ": ".join([f"its process died ({what})", *([reason] if reason else last)])
        return WorkerDied(said, by, no_memory=reason)

    def _last_words(self) -> list[str]:
        self._errors.seek(0)
        return self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()[-1:]


def environment() -> dict[str, str]:
    """The environment of every worker: compiled code goes where the next one, and the next run of
    the notebook, finds it."""
    cache = cache_dir()
    shared = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # Inductor's own pool of compiler processes would start for each worker, and then idle on
        # the cores beside the timed calls.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**shared, **given, **compiler.environment(given, cache)}
