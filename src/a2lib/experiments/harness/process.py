"""A worker seen from the notebook: tasks out, events in, no hang and no orphan.

A thread of the notebook launches its processes (``launching``), one or several that measure
together; each task goes to every one of them, and what rank 0 reports comes back. They stay for the
next task.

Once one of several has raised or died, or none has said anything for too long, the collectives of
the others are no longer paired: the worker ends, with the reason, and the sweep starts another.
"""

import contextlib
import json
import os
import queue
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TextIO

from a2lib.errors import OneLine
from a2lib.experiments.harness.ranks import DEVICES, Ranks
from a2lib.experiments.launching.launcher import RankFailed, TimeLimitPassed, launch
from a2lib.paths import cache_dir

START_TIMEOUT_S = 180
# How long a worker may take to end; a process in the middle of a driver call takes its time.
END_S = 20.0
# A worker lives as long as a notebook; who is silent is ended here.
FOREVER_S = 30 * 24 * 3600.0
COLLECTIVE_S = 24 * 3600.0
# What a process does not do to itself.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerDied(OneLine, RuntimeError):
    """The worker ended or was ended before it had finished its task; ``status`` is that of the row
    that the message is the note of. Where somebody ended it, ``from_outside``, it says nothing
    about the task."""

    def __init__(self, message: str, from_outside: bool = False, status: str = "error") -> None:
        super().__init__(message)
        self.from_outside, self.status = from_outside, status


class _Closed(Exception):
    """The launch is not wanted any more."""


class Worker:
    """Processes that do what ``ranks.serve`` says, ready once they can call ``handler``,
    "module:function": one, or ``ranks`` that work together."""

    def __init__(self, handler: str, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.ready = self.closed = False
        self._closing = threading.Lock()
        self._events: queue.Queue[dict | None] = queue.Queue()  # None: there will be no more
        self._world_size = ranks.world_size if ranks else 1
        self._busy = set(range(self._world_size))
        self._pipes: list[TextIO] = []
        self._raised: dict[int, dict] = {}  # by rank
        self._silent = ""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._launch, args=(handler,), daemon=True)
        self._thread.start()

    def ask(self, task: dict, silence_s: float) -> Iterator[dict]:
        """Send ``task`` and yield its events.

        Raises WorkerDied when a process ends before it is done, or, having killed them, when they
        say nothing for ``silence_s`` seconds.
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
        """End the processes and everything they started; safe to call again, and from any
        thread."""
        with self._closing:
            self.closed = True
            self._thread.join(END_S)
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # of a task that nobody took
                    pipe.close()

    def _launch(self, handler: str) -> None:
        backend = self.ranks and self.ranks.backend
        try:
            launch(
                "a2lib.experiments.harness.ranks:serve",
                {"handler": handler, "backend": backend},
                processes=self._world_size,
                time_limit_s=FOREVER_S,
                device=DEVICES[backend] if backend in ("gloo", "nccl") else None,
                collective_timeout_s=COLLECTIVE_S,
                on_progress=self._hear,
                on_output=lambda rank, line: None,  # an error has the last lines
                overdue=self._overdue,
                env=environment(),
            )
        except Exception as error:
            self._error = error
        finally:
            self._events.put(None)

    def _hear(self, rank: int, event: dict) -> None:
        if "tasks" in event:
            with contextlib.suppress(OSError):  # it has died since
                pipe = os.open(event["tasks"], os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(pipe, True)
                self._pipes.append(open(pipe, "w"))
        if "raised" in event and self.ranks:
            self._raised[rank] = event
            event = {}
        elif "ready" in event or "done" in event:
            self._busy.discard(rank)
            event = {} if self._busy else event
        self._events.put(event)

    def _send(self, line: str) -> None:
        self._busy = set(range(self._world_size))
        for pipe in self._pipes:
            pipe.write(line)
            pipe.flush()

    def _next(self, silence_s: float) -> dict:
        try:
            event = self._events.get(timeout=silence_s)
        except queue.Empty:
            raise self._died(f"no answer within {silence_s:g} s") from None
        if event is None:
            raise self._died()
        return event

    def _overdue(self) -> str | None:
        if self.closed:
            raise _Closed("it was closed")
        return self._silent or None

    def _died(self, silent: str = "") -> WorkerDied:
        """Why it ended; having ended it, where it is ``silent``."""
        self._silent = silent
        self._thread.join(END_S)
        error = self._error
        self.close()
        return why(error, self._raised, self._world_size)


def why(error: Exception | None, raised: Mapping[int, dict], world_size: int) -> WorkerDied:
    """What is said of a worker that ended with ``error``, where ranks had ``raised`` before."""
    rank, code = getattr(error, "rank", None), getattr(error, "code", None) or 0
    said, *more = str(error).splitlines() if error else ["it stopped answering"]
    if rank in raised:
        note = f"rank {rank} of {world_size}: {raised[rank]['raised']}"
        return WorkerDied(note, status=raised[rank]["status"])
    if isinstance(error, TimeLimitPassed):
        said = f"{said}: {where(error.stacks)}"
    elif isinstance(error, RankFailed) and world_size == 1:
        how = said.partition(": ")[2]
        said = f"its process died ({how})"
        if more and more[-1] != how:
            said += f": {more[-1]}"
    return WorkerDied(said, -code in OUTSIDE)


def where(stacks: Mapping[int, str]) -> str:
    """Where ranks stand, in a few words: the innermost call of each."""
    at: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        found = re.search(r'File "(?:.*/)?(.+)", line (\d+) in (.+)', text)
        call = f"{found[3]} ({found[1]}:{found[2]})" if found else "nowhere known"
        at.setdefault(call, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} in {call}"
        for call, ranks in at.items()
    )


def environment() -> dict[str, str]:
    """What the environment of every worker has: compiled code goes where the next one, and the next
    run of the notebook, finds it."""
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
