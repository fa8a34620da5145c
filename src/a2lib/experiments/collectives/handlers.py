"""What each rank does for the section of collectives: one task is one operation, many sizes.

Every rank times the same calls from the same start, and rank 0 puts what all of them measured.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from a2lib.experiments.collectives import DTYPES
from a2lib.experiments.harness import RankJob, Row
from a2lib.lab import COLLECTIVES, memory, synchronize
from a2lib.lab.clock import Mark
from a2lib.lab.failures import note as one_line
from a2lib.lab.timing import each_rank, from_rest, sample_count, slowest
from a2lib.parallel.group import all_gather_single, reduce_scatter_single

WARMUP = 5
# A call that takes this long is not repeated to warm up, but for once.
LONG_MS = 500.0
BUDGET_MS = {"cuda": 300.0, "cpu": 700.0}
CALLS = (5, 100)
# Calls in a row, so many of them that the host's start is small in their sum; how often that.
QUEUED_MS, QUEUED_CALLS, QUEUED_TIMES = 40.0, (20, 200), 5
# A tensor and what the operation takes beside it, gloo's buffers included.
TENSORS = 3
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(job: RankJob) -> None:
    """Measure each size that is wanted."""
    for keys in job.each():
        job.put(*({**key, **values(job, key)} for key in keys))


@dataclass(frozen=True)
class Call:
    """An operation on tensors of its own: the ``whole`` one and this rank's ``part`` of it."""

    run: Callable[[], object]
    whole: torch.Tensor
    part: torch.Tensor

    @classmethod
    def from_size(cls, operation: str, size: int, dtype: str, world_size: int, device: str) -> Self:
        """On ``size`` bytes, or the few more that all ranks have equal parts of."""
        each = -(-size // (DTYPES[dtype] * world_size))
        made = {"dtype": _TORCH[dtype], "device": device}
        whole = torch.zeros(world_size * each, **made)
        part = torch.zeros(each, **made)
        run = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: all_gather_single(whole, part),
            "reduce_scatter": lambda: reduce_scatter_single(part, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }[operation]
        return cls(run, whole, part)

    def is_right(self, operation: str, rank: int, world_size: int, seed: int) -> bool:
        """Whether one call gives what it should: small whole numbers, another in each part."""
        base = 1 + seed % 5
        parts = self.whole.view(world_size, -1)
        for j, own in enumerate(parts):
            own.fill_(0 if operation == "broadcast" and rank else base + j + rank)
        self.part.fill_(base + rank)
        self.run()
        ranks = range(world_size)
        sums = [world_size * (base + j) + sum(ranks) for j in ranks]
        if operation == "reduce_scatter":
            return bool((self.part == sums[rank]).all())
        expected = sums if operation == "all_reduce" else range(base, base + world_size)
        return all(bool((own == x).all()) for own, x in zip(parts, expected, strict=True))


def values(job: RankJob, key: Row) -> Row:
    """The values of a row, the same on every rank."""
    operation, size = key["operation"], key["size"]
    room = min(job.everyone(memory.free_bytes(job.device)))
    # On the CPU all ranks share the memory.
    needed = TENSORS * size * (job.world_size if job.device == "cpu" else 1)
    if needed > room:
        note = f"would take {needed / 1e9:.1f} GB of {room / 1e9:.1f}"
        return {"status": "oom", "note": note}
    call = Call.from_size(operation, size, key["dtype"], job.world_size, job.device)
    try:
        right = call.is_right(operation, job.rank, job.world_size, job.seed)
    except RuntimeError as error:
        if "not support" not in str(error):
            raise
        # The same on every rank, so the group is as it was.
        return {"status": "unsupported", "note": one_line(str(error))}
    right = job.everyone(right)
    if not all(right):
        wrong = [rank for rank, ok in enumerate(right) if not ok]
        return {"status": "error", "note": f"wrong result on ranks {wrong}"}
    call.whole.zero_()  # a sum of sums would overflow
    call.part.zero_()
    return {"status": "ok", **_timed(job, call.run)}


def _timed(job: RankJob, run: Callable[[], object]) -> Row:
    def agreed(ms: float) -> float:
        return max(job.everyone(ms))

    estimate = agreed(from_rest(run, job.device))
    if estimate < LONG_MS:
        estimate = agreed([from_rest(run, job.device) for _ in range(WARMUP)][-1])
    n = sample_count(BUDGET_MS[job.device], estimate, *CALLS)
    by_rank = job.everyone([from_rest(run, job.device) for _ in range(n)])
    row = slowest(by_rank).row(COLLECTIVES) | each_rank(by_rank)
    if job.device == "cuda":
        many = sample_count(QUEUED_MS, estimate, *QUEUED_CALLS)
        queued = [agreed(_queued(run, many)) for _ in range(QUEUED_TIMES)]
        row["ms_queued"] = statistics.median(queued)
    return row


def _queued(run: Callable[[], object], calls: int) -> float:
    """Milliseconds a call of so many in a row, by CUDA events around all of them."""
    synchronize("cuda")
    dist.barrier()
    start = Mark("cuda")
    for _ in range(calls):
        run()
    end = Mark("cuda")
    synchronize("cuda")
    return start.ms_until(end) / calls
