"""What the collectives experiment measures: its parameters, and the sweeps' sizes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import names, parameter
from a2lib.experiments.harness.ranks import Ranks
from a2lib.theory.latency import OPERATIONS

MB = 2**20
KB = 2**10
DTYPES = {"fp32": 4, "bf16": 2}
SWEEPS = ("handout", "sizes", "operations", "all")
HANDOUT_SIZES = tuple(n * MB for n in (1, 10, 100, 1024))
WORLD_SIZES = {"nccl": (2, 4, 6, 8), "gloo": (2, 4, 6)}
# For the line of latency and bandwidth; gloo's largest is the handout's.
SIZES = {
    "nccl": (16 * KB, 64 * KB, 256 * KB, *(n * MB for n in (2, 4, 25, 50, 250, 512))),
    "gloo": (16 * KB, 64 * KB, 256 * KB, *(n * MB for n in (4, 25, 250))),
}
OTHER_SIZES = {"nccl": HANDOUT_SIZES, "gloo": HANDOUT_SIZES[:3]}


@dataclass(frozen=True)
class Collective:
    """One operation between ``ranks`` on a tensor of ``size`` bytes, over all ranks."""

    ranks: Ranks
    operation: str
    dtype: str
    size: int

    def key(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "backend": self.ranks.backend,
            "world_size": self.ranks.world_size,
            "dtype": self.dtype,
            "size": self.size,
        }


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/collectives.ipynb, in the order of its cell."""

    operations: str = parameter(
        "all_reduce", f"comma list of {', '.join(OPERATIONS)}", kind=str, many=OPERATIONS
    )
    world_size: int = parameters.world_size()
    backend: str = parameters.backend()
    dtype: str = parameter("fp32", " or ".join(DTYPES), kind=str, choices=tuple(DTYPES))
    megabytes: int | None = parameter(
        None,
        "of the whole tensor, 2**20 bytes each; None: 100 on GPUs, 1 on the CPU",
        kind=int,
        minimum=1,
        maximum=2**16,
        optional=True,
    )
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of the numbers sent")

    def __post_init__(self) -> None:
        fixed = ("operations", "world_size", "backend", "dtype", "megabytes")
        parameters.refuse_beside_sweep(self, fixed)

    def has(self, sweep: str) -> bool:
        return self.sweep in (sweep, "all")

    def collectives(self, gpus: int) -> list[Collective]:
        """What to measure on a machine of so many GPUs, those of the same ranks together.

        Raises ParameterError where a single shape asks for more GPUs than there are.
        """
        if self.sweep != "shape":
            found = [c for ranks in _every(gpus) for c in self._sweeps(ranks)]
            return list(dict.fromkeys(found))
        ranks = parameters.ranks(self)
        size = (self.megabytes or {"cuda": 100, "cpu": 1}[ranks.device]) * MB
        return [Collective(ranks, name, self.dtype, size) for name in names(self.operations)]

    def _sweeps(self, ranks: Ranks) -> Iterator[Collective]:
        """The handout's sizes first."""
        sum_, *others = OPERATIONS
        if ranks.world_size <= 6 and self.has("handout"):
            yield from _of(ranks, (sum_,), ("fp32",), HANDOUT_SIZES)
        dtypes = tuple(DTYPES) if ranks.backend == "nccl" else ("fp32",)
        if self.has("sizes"):
            yield from _of(ranks, (sum_,), ("fp32",), SIZES[ranks.backend])
            yield from _of(ranks, (sum_,), dtypes, HANDOUT_SIZES)
        if self.has("operations"):
            yield from _of(ranks, others, dtypes, OTHER_SIZES[ranks.backend])


def _every(gpus: int) -> list[Ranks]:
    """Every group of a sweep, those on GPUs first: they take the least time."""
    return [
        Ranks(n, backend)
        for backend, counts in WORLD_SIZES.items()
        for n in counts
        if backend == "gloo" or n <= gpus
    ]


def _of(
    ranks: Ranks, operations: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int]
) -> Iterator[Collective]:
    sizes = tuple(sizes)
    for operation in operations:
        for dtype in dtypes:
            yield from (Collective(ranks, operation, dtype, size) for size in sizes)
