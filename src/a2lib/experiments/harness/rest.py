"""Times of what several ranks do together, each call from where all of them are idle."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from a2lib.measure import synchronize


def from_rest(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call by the host's clock, from where all ranks are idle to where this
    one is again; every rank calls it."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def calls(budget_ms: float, estimate_ms: float, limits: tuple[int, int]) -> int:
    """How many calls fit the budget, within the limits."""
    fewest, most = limits
    return max(fewest, min(most, int(budget_ms / max(estimate_ms, 1e-6))))
