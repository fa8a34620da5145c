"""Several processes that measure together, and speak the protocol of ``worker`` as one.

A thread of the notebook launches them (``parallel.launcher``); each task goes to every rank, and
what rank 0 reports comes back. The handler is called in each rank with a ``RankJob``; the ranks
stay for the next task.

Once a rank has raised or died, or none has said anything for too long, the collectives of the
others are no longer paired: the group ends, with the reason, and the sweep starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from a2lib.experiments.harness.process import OUTSIDE, Worker, WorkerDied, environment
from a2lib.experiments.harness.worker import Job, do, fields, load, settle
from a2lib.parallel.launcher import TimeLimitPassed, launch
from a2lib.parallel.lifeline import FOLDER
from a2lib.parallel.rank import progress

DEVICES = {"gloo": "cpu", "nccl": "cuda", "none": "cpu"}
# Of NCCL, what its times depend on.
SWITCHES = tuple(
    f"NCCL_{name}"
    for name in ("ALGO", "PROTO", "NVLS_ENABLE", "P2P_DISABLE", "SHM_DISABLE", "MIN_CTAS")
    + ("MAX_CTAS", "CUMEM_ENABLE", "GRAPH_REGISTER")
)
# How long a group may take to end; a process in the middle of a driver call takes its time.
END_S = 20.0
# The groups live as long as a notebook; who is silent is ended here.
FOREVER_S = 30 * 24 * 3600.0
COLLECTIVE_S = 24 * 3600.0


@dataclass(frozen=True)
class Ranks:
    """``world_size`` processes of this host in a group of ``backend``: "gloo" on the CPU, "nccl"
    with a GPU each, or "none", which is no process group (and loads no torch)."""

    world_size: int
    backend: str

    @property
    def device(self) -> str:
        return DEVICES[self.backend]


@dataclass(frozen=True)
class RankJob(Job):
    """A ``Job`` that ``world_size`` ranks do together. What rank 0 puts and emits is what counts;
    the others may call the same, to no effect. A row gets the ``conditions`` of this machine where
    its section has that column."""

    rank: int = 0
    world_size: int = 1

    def put(self, *rows: dict) -> None:
        if self.rank == 0:
            if "conditions" in self.store.section.columns:
                here = conditions(self.device)
                rows = [{**row, "conditions": here} for row in rows]
            super().put(*rows)

    def everyone(self, value: object) -> list:
        """The values of all ranks, in rank order; every rank calls it."""
        from a2lib.parallel.group import everyone

        return everyone(value)

    def expired(self) -> bool:
        """What rank 0's clock says, so that all go the same way; every rank calls it."""
        return self.everyone(super().expired())[0]


def conditions(device: str) -> str:
    """What times of messages depend on beside what is asked for: on "cpu" the processor and its
    cores, on "cuda" those of NCCL's switches that are set."""
    if device == "cuda":
        set_ = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
        return ", ".join(set_)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return " ".join(lines[0].split()) if lines else "a processor without a name"


class Group(Worker):
    """``ranks`` that call ``handler``, "module:function", together."""

    def __init__(self, handler: str, ranks: Ranks) -> None:
        self.ranks = ranks
        self._busy = set(range(ranks.world_size))
        self._pipes: list[TextIO] = []
        self._raised: dict[int, dict] = {}  # by rank
        self._silent = ""
        self._error: Exception | None = None
        super().__init__(handler)

    def _start(self, handler: str) -> None:
        self._thread = threading.Thread(target=self._launch, args=(handler,), daemon=True)
        self._thread.start()

    def _launch(self, handler: str) -> None:
        backend = self.ranks.backend
        try:
            launch(
                f"{__name__}:serve",
                {"handler": handler, "backend": backend},
                processes=self.ranks.world_size,
                time_limit_s=FOREVER_S,
                device=None if backend == "none" else DEVICES[backend],
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
            # Also for reading, so that neither this nor a write waits for a rank that is not there.
            self._pipes.append(open(os.open(event["tasks"], os.O_RDWR), "w"))
        if "raised" in event:
            self._raised[rank] = event
            event = {}
        elif "ready" in event or "done" in event:
            self._busy.discard(rank)
            event = {} if self._busy else event
        self._events.put(event)

    def _send(self, line: str) -> None:
        self._busy = set(range(self.ranks.world_size))
        for pipe in self._pipes:
            pipe.write(line)
            pipe.flush()

    def _overdue(self) -> str | None:
        if self.closed:
            raise _Closed
        return self._silent or None

    def _died(self, silent: str = "") -> WorkerDied:
        self._silent = silent
        self._thread.join(END_S)
        error = self._error
        self.close()
        return why(error, self._raised, self.ranks.world_size)

    def _end(self) -> None:
        self._thread.join(END_S)
        for pipe in self._pipes:
            pipe.close()


class _Closed(Exception):
    """The launch is not wanted any more."""


def why(error: Exception | None, raised: Mapping[int, dict], world_size: int) -> WorkerDied:
    """What is said of a group that ended with ``error``, where ranks had ``raised`` before."""
    rank, code = getattr(error, "rank", None), getattr(error, "code", None) or 0
    said = str(error).partition("\n")[0] if error else "its processes stopped answering"
    if rank in raised:
        note = f"rank {rank} of {world_size}: {raised[rank]['raised']}"
        return WorkerDied(note, status=raised[rank]["status"])
    if isinstance(error, TimeLimitPassed):
        return WorkerDied(f"{said}: {where(error.stacks)}")
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


def serve(handler: str, backend: str) -> None:
    """What each rank does: the tasks from its pipe, until that ends. What one raises ends it, and
    so the group."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    load(handler)
    settle()
    with contextlib.ExitStack() as held:
        if backend == "nccl" and rank:  # the first GPU is locked by the notebook
            from a2lib.measure import DeviceLock

            held.enter_context(DeviceLock("cuda").held(f"rank {rank} of {world_size}"))
        pipe = Path(os.environ[FOLDER], f"{rank}.tasks")
        os.mkfifo(pipe)
        progress(ready=True, tasks=str(pipe))
        for line in held.enter_context(open(pipe)):
            task = json.loads(line)
            emit = _emit if rank == 0 else lambda event: None
            do(
                task["do"],
                RankJob(emit=emit, rank=rank, world_size=world_size, **fields(task)),
                _emit,
            )
            settle(task["device"])
            progress(done=True)


def _emit(event: dict) -> None:
    progress(**event)
