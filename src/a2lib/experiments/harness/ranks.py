"""Several processes that measure together, and speak the protocol of ``worker`` as one.

    python -m a2lib.experiments.harness.ranks package.module:function 4 gloo

A process between the notebook and torchrun: it hands each task to every rank, and on what rank 0
reports. The handler is called in each rank with a ``RankJob``; the ranks stay for the next task.

Once a rank has raised or died, or none has said anything for the task's ``silence_s``, the
collectives of the others are no longer paired: the group ends, with the reason, and the sweep
starts another. Where a rank was killed from outside, this process ends by the same signal, which
is how a sweep knows it of any worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from a2lib.experiments.harness.worker import OUTSIDE, Emit, Job, events, fields, free_memory, load
from a2lib.parallel.launcher import LaunchError, TimeLimitPassed, launch
from a2lib.parallel.rank import progress

HERE = "a2lib.experiments.harness.ranks"
DEVICES = {"gloo": "cpu", "nccl": "cuda", "none": "cpu"}
# How long a group may take to end; a process in the middle of a driver call takes its time.
END_S = 20.0
# The groups live as long as a notebook; a task's own limit is its silence_s.
FOREVER_S = 30 * 24 * 3600.0
COLLECTIVE_S = 24 * 3600.0
_LOST, _NOT_STARTED = 3, 4


@dataclass(frozen=True)
class Ranks:
    """``world_size`` processes of this host in a group of ``backend``: "gloo" on the CPU, "nccl"
    with a GPU each, or "none", which is no process group (and loads no torch)."""

    world_size: int
    backend: str

    @property
    def device(self) -> str:
        return DEVICES[self.backend]


def gpus_of(groups: Iterable[Ranks]) -> int:
    """How many GPUs the largest of ``groups`` takes; 1 where none is on GPUs, as for a process that
    measures alone."""
    return max((group.world_size for group in groups if group.device == "cuda"), default=1)


@dataclass(frozen=True)
class RankJob(Job):
    """A ``Job`` that ``world_size`` ranks do together. What rank 0 puts and emits is what counts;
    the others may call the same, to no effect."""

    rank: int = 0
    world_size: int = 1

    def put(self, row: dict) -> None:
        if self.rank == 0:
            super().put(row)

    def everyone(self, value: object) -> list:
        """The values of all ranks, in rank order; every rank calls it."""
        import torch.distributed as dist

        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def expired(self) -> bool:
        """What rank 0's clock says, so that all go the same way; every rank calls it."""
        return self.everyone(super().expired())[0]


def command(handler: str, ranks: Ranks) -> tuple[str, ...]:
    """The command of a worker whose ``ranks`` call ``handler``, "module:function"."""
    return (sys.executable, "-m", HERE, handler, str(ranks.world_size), ranks.backend)


def serve(folder: str, handler: str, backend: str) -> None:
    """What each rank does: the tasks from its pipe, until that ends."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    load(handler)
    with contextlib.ExitStack() as held:
        if backend == "nccl" and rank:  # the first GPU is locked by the notebook
            from a2lib.measure import DeviceLock

            held.enter_context(DeviceLock("cuda").held(f"rank {rank} of {world_size}"))
        progress(ready=True)
        with open(_pipe(folder, rank)) as lines:
            for line in lines:
                task = json.loads(line)
                _do(task, rank, world_size)
                free_memory(task["device"])
                progress(done=True)


def _do(task: dict, rank: int, world_size: int) -> None:
    """Do one task; what is raised ends this rank, and so the group."""
    from a2lib.measure import StoreError
    from a2lib.measure.failures import classify

    def emit(event: dict) -> None:
        if rank == 0:
            progress(**event)

    try:
        load(task["do"])(RankJob(emit=emit, rank=rank, world_size=world_size, **fields(task)))
    except StoreError as error:
        progress(fatal=str(error))
        raise
    except Exception as error:
        status, note = classify(error)
        progress(raised=note, status=status)
        raise


class _Group:
    """What is known of the ranks: who is at work, since when nothing was heard, what was raised."""

    def __init__(self, world_size: int, emit: Emit) -> None:
        self.world_size, self.emit = world_size, emit
        self.busy = set(range(world_size))
        self.started = False
        self.raised: dict[int, dict] = {}
        self.silence_s, self.heard = float("inf"), time.monotonic()

    def asked(self, task: dict) -> None:
        self.busy = set(range(self.world_size))
        self.silence_s, self.heard = task["silence_s"], time.monotonic()

    def event(self, rank: int, event: dict) -> None:
        self.heard = time.monotonic()
        if "raised" in event:
            self.raised[rank] = event
        elif "ready" in event or "done" in event:
            self.busy.discard(rank)
            if not self.busy:
                self.started = True
                self.emit(event)
        else:
            self.emit(event)

    def overdue(self) -> str | None:
        silent = self.busy and time.monotonic() > self.heard + self.silence_s
        return f"no answer within {self.silence_s:g} s" if silent else None

    def failure(self, error: LaunchError) -> dict:
        """The event of a task that ended with ``error``."""
        if isinstance(error, TimeLimitPassed):
            first = str(error).splitlines()[0]
            return {"raised": f"{first}: {where(error.stacks)}", "status": "error"}
        if error.rank in self.raised:
            known = self.raised[error.rank]
            note = f"rank {error.rank} of {self.world_size}: {known['raised']}"
            return {"raised": note, "status": known["status"]}
        return {"raised": str(error).splitlines()[0], "status": "error"}


def where(stacks: dict[int, str]) -> str:
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


def main(handler: str, world_size: int, backend: str) -> None:
    """Serve tasks until the standard input ends or the group does."""
    # A shell in the background leaves it ignored, and with it the end of the group.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    emit = events()
    from a2lib.experiments.harness import compiler

    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        compiler.drop_broken(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    group = _Group(world_size, emit)
    with tempfile.TemporaryDirectory(prefix="a2lib-ranks-") as folder:
        pipes = [_pipe(folder, rank) for rank in range(world_size)]
        for pipe in pipes:
            os.mkfifo(pipe)
        threading.Thread(target=_feed, args=(pipes, group), daemon=True).start()
        try:
            launch(
                f"{HERE}:serve",
                {"folder": folder, "handler": handler, "backend": backend},
                processes=world_size,
                time_limit_s=FOREVER_S,
                device=None if backend == "none" else DEVICES[backend],
                collective_timeout_s=COLLECTIVE_S,
                on_progress=group.event,
                on_output=lambda rank, line: print(f"[rank {rank}] {line}", file=sys.stderr),
                overdue=group.overdue,
            )
        except LaunchError as error:
            failure = error
        except KeyboardInterrupt:
            sys.exit(0)
    _end(group, failure, emit)


def _feed(pipes: list[Path], group: _Group) -> None:
    """Hand each line of the standard input to every rank; interrupt the main thread at its end."""
    # Also for reading, so that neither this nor a write waits for a rank that is not there.
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(os.open(pipe, os.O_RDWR), "w")) for pipe in pipes]
        for line in sys.stdin:
            group.asked(json.loads(line))
            for file in files:
                file.write(line)
                file.flush()
        os.kill(os.getpid(), signal.SIGINT)


def _end(group: _Group, error: LaunchError, emit: Emit) -> None:
    reason = group.failure(error)
    print(reason["raised"], file=sys.stderr, flush=True)
    if not group.started:
        os._exit(_NOT_STARTED)
    by = -(error.code or 0)
    if by in OUTSIDE and error.rank not in group.raised:
        if by != signal.SIGKILL:
            signal.signal(by, signal.SIG_DFL)
        os.kill(os.getpid(), by)
    emit(reason)
    os._exit(_LOST)


def _pipe(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.tasks")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
