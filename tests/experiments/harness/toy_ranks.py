"""A section measured by ranks that play a part: rank 1 is killed or hangs, rank 0 waits for it.

Without a process group, so that starting a rank takes no time; ``measure_in_group`` has one.
"""

import os
import signal
import time
from pathlib import Path

from experiments.harness.toy import OK

from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.launching.lifeline import FOLDER
from a2lib.lab import Section

HERE = "experiments.harness.toy_ranks"
RANKS = Section("ranks", ("operation", "size"), ("note",), handler=f"{HERE}:measure")
IN_GROUP = Section("ranks", ("operation", "size"), ("note",), handler=f"{HERE}:measure_in_group")
WAIT_S = 600


def task(operation, world_size=2, backend="none", **spec):
    """One row; ``part`` of its spec is what rank 1 does."""
    rows = {operation: ({"operation": operation, "size": world_size},)}
    return Task(operation, spec, rows, ranks=Ranks(world_size, backend))


def measure(job):
    """Put a row whose note is rank 0's process, or play the part."""
    (((operation, (key,)),)) = job.wanted.items()
    job.begin(operation)
    part = job.spec.get("part")
    if "pids" in job.spec:
        Path(job.spec["pids"], str(os.getpid())).touch()
    log = Path(job.spec.get("log", os.devnull))
    # Not this group, of which rank 1 may have written it just now.
    killed_before = log.exists() and log.read_text() not in ("", os.environ[FOLDER])
    if part == "hang" or (part and job.rank != 1 and not killed_before):
        time.sleep(WAIT_S)
    if part == "killed once" and not killed_before:
        log.write_text(os.environ[FOLDER])
        os.kill(os.getpid(), signal.SIGKILL)
    job.put({**key, **OK, "note": str(os.getpid())})


def measure_in_group(job):
    """Put a row whose note has what the ranks said to each other."""
    import torch
    import torch.distributed as dist

    ((operation, (key,)),) = job.wanted.items()
    if job.spec.get("part") == "raise" and job.rank == 1:
        raise ValueError("one\ntwo")
    total = torch.tensor([job.rank + 1.0], device=job.device)
    dist.all_reduce(total)
    said = job.everyone([job.rank, os.getpid()])
    job.put({**key, **OK, "note": f"{total.item():g} {said} {dist.get_backend()}"})
    if job.spec.get("part") == "late":
        # Rank 1's clock alone says so.
        object.__setattr__(job, "until", 0.0 if job.rank else None)
        assert not job.expired()
