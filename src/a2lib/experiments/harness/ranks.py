"""What the processes of a worker do: one alone, or several that measure together.

A task goes to each of them, and the handler is called with a ``Job``, in each of several with a
``RankJob``.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from a2lib.experiments.harness.worker import Job, at_work, fields, load, settle
from a2lib.experiments.launching.launcher import cores
from a2lib.experiments.launching.lifeline import FOLDER
from a2lib.experiments.launching.rank import progress
from a2lib.lab import DeviceLock, StoreError
from a2lib.lab.failures import classify, is_lost

DEVICES = {"gloo": "cpu", "nccl": "cuda", "none": "cpu"}
# Of NCCL, what its times depend on.
SWITCHES = tuple(
    f"NCCL_{name}"
    for name in ("ALGO", "PROTO", "NVLS_ENABLE", "P2P_DISABLE", "SHM_DISABLE", "MIN_CTAS")
    + ("MAX_CTAS", "CUMEM_ENABLE", "GRAPH_REGISTER")
)


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
        return ", ".join(f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ)
    return f"{_processor()}, {cores()} cores"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return "a processor without a name"


def serve(handler: str, backend: str | None) -> None:
    """What each process does: the tasks from its pipe, one JSON line each, until it is ended.

    With ``backend`` None it is alone. What one of several raises ends it, and so all of them; what
    one alone raises, only where the device or the disk is of no more use.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    load(handler)
    settle()
    pipe = Path(os.environ[FOLDER], f"{rank}.tasks")
    os.mkfifo(pipe)
    with (
        open(os.open(pipe, os.O_RDWR)) as tasks,
        # The first GPU is locked by the notebook.
        DeviceLock("cuda").held(f"rank {rank} of {world_size}")
        if backend == "nccl" and rank
        else contextlib.nullcontext(),
    ):
        progress(ready=True, tasks=str(pipe))
        for line in tasks:
            task = json.loads(line)
            given = fields(task)
            if rank == 0:
                given["emit"] = lambda event: progress(**event)
            alone = backend is None
            job = Job(**given) if alone else RankJob(rank=rank, world_size=world_size, **given)
            try:
                with at_work():
                    load(task["do"])(job)
            except StoreError as error:
                progress(fatal=str(error))
                raise
            except Exception as error:
                status, why = classify(error)
                progress(raised=why, status=status)
                if not alone or is_lost(error):
                    raise
            settle(task["device"])
            progress(done=True)
