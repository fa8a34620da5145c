"""Times of what several ranks do together, from where all of them are idle."""

import statistics
import time
from collections.abc import Callable, Sequence

from a2lib.measure.device import synchronize
from a2lib.measure.timing import Timing


def meet(device: str) -> None:
    """All ranks at rest, from where they start together; collective."""
    import torch.distributed as dist

    synchronize(device)
    dist.barrier()
    synchronize(device)


def from_rest(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call by the host's clock, from where all ranks are idle to where this
    one is again; every rank calls it."""
    meet(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def slowest(by_rank: Sequence[Sequence[float]]) -> Timing:
    """Of times that each rank took of the same calls: each call's longest."""
    return Timing.from_samples([max(times) for times in zip(*by_rank, strict=True)])


def each_rank(by_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """The columns of what the ranks took by themselves: of their medians the least, the median and
    the most."""
    own = [statistics.median(times) for times in by_rank]
    return {
        "ms_rank_min": min(own),
        "ms_rank_median": statistics.median(own),
        "ms_rank_max": max(own),
    }
