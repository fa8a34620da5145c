"""The collectives experiment: what notebooks/collectives.ipynb calls; ``handlers`` has the ranks'
part."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from a2lib.experiments.harness import Experiment, Plot, Ranks, Table, Task, parameters
from a2lib.experiments.harness.parameters import OnRanks, WithSweep, count, names, parameter
from a2lib.lab import COLLECTIVES, gpu_count
from a2lib.theory.latency import OPERATIONS, wire_share

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
        how = {"operation": self.operation, "dtype": self.dtype, "size": self.size}
        return how | vars(self.ranks)


@dataclass(frozen=True)
class Parameters(OnRanks, WithSweep):
    operations: str = parameter(
        "all_reduce", f"comma list of {', '.join(OPERATIONS)}", many=OPERATIONS
    )
    dtype: str = parameter("fp32", " or ".join(DTYPES), choices=tuple(DTYPES))
    megabytes: int | None = count(
        None, "of the whole tensor, 2**20 bytes each; None: 100 on GPUs, 1 on the CPU", 2**16
    )
    sweep: str = parameters.sweep(SWEEPS)

    def asked(self) -> list[Collective]:
        """What to measure on this machine, those of the same ranks together.

        Raises ParameterError where a single shape asks for more GPUs than there are.
        """
        if self.sweep != "shape":
            # Those on GPUs first: they take the least time.
            groups = [Ranks(n, b) for b, counts in WORLD_SIZES.items() for n in counts]
            here = [one for one in groups if one.backend == "gloo" or one.world_size <= gpu_count()]
            every = ((ranks, *how) for ranks in here for how in self._sweeps(ranks))
            return list(dict.fromkeys(itertools.starmap(Collective, every)))
        ranks = self.ranks()
        size = (self.megabytes or {"cuda": 100, "cpu": 1}[ranks.device]) * MB
        return [Collective(ranks, name, self.dtype, size) for name in names(self.operations)]

    def _sweeps(self, ranks: Ranks) -> Iterator[tuple[str, str, int]]:
        """(Operation, dtype, size), the handout's sizes first."""
        sum_, *others = OPERATIONS
        if ranks.world_size <= 6 and self.has("handout"):
            yield from itertools.product((sum_,), ("fp32",), HANDOUT_SIZES)
        dtypes = tuple(DTYPES) if ranks.backend == "nccl" else ("fp32",)
        if self.has("sizes"):
            yield from itertools.product((sum_,), ("fp32",), SIZES[ranks.backend])
            yield from itertools.product((sum_,), dtypes, HANDOUT_SIZES)
        if self.has("operations"):
            yield from itertools.product(others, dtypes, OTHER_SIZES[ranks.backend])


def tasks(collectives: Iterable[Collective]) -> list[Task]:
    """A task for each operation and dtype of the same ranks, each size its own culprit."""
    grouped: dict[tuple, dict[str, tuple]] = {}
    for one in collectives:
        sizes = grouped.setdefault((one.ranks, one.operation, one.dtype), {})
        sizes[f"{one.size / MB:g} MB"] = (one.key(),)
    return [
        Task(f"{operation} {dtype}, {ranks.backend} {ranks.world_size}", {}, rows, ranks=ranks)
        for (ranks, operation, dtype), rows in grouped.items()
    ]


def _algorithm(row: Mapping[str, str]) -> float:
    return int(row["size"]) / float(row["ms"]) / 1e6


def _bus(row: Mapping[str, str]) -> float:
    return _algorithm(row) * wire_share(row["operation"], int(row["world_size"]))


TIMES = Table(
    COLLECTIVES,
    lambda given, device: tasks(given.asked()),
    says="The median call of the slowest rank, those of the ranks themselves, and the bandwidths",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_rank_min", "ms_rank_median", "ms_rank_max")
    + ("ms_queued",),
    derived={"algorithm, GB/s": _algorithm, "bus, GB/s": _bus},
    plot=Plot(y="bus, GB/s", x="size", panels=("operation",)),
    silence_s=180,  # a collective that is silent for this long hangs
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "Collectives on one node")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
