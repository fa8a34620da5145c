"""What the experiment on the sharded optimizer measures: trainings, and in each the wrappers with
the optimizers that are held against each other. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.benchmark.configurations import MODELS
from a2lib.experiments.data_parallel import configurations as data_parallel
from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import ParameterError, names, parameter
from a2lib.experiments.harness.ranks import Ranks

# Of whose wrapper each is a peer; PyTorch's is made for PyTorch's.
OPTIMIZERS = ("plain", "sharded", "zero")
WRAPPERS = ("bucketed", "copy_engines", "torch_ddp")
SWEEPS = ("essential", "memory", "handout", "all")
OURS_MB, TORCH_MB = 100, 25
MOMENTS = ("init", "before", "after", "step")


@dataclass(frozen=True)
class Way:
    """Who averages gradients and who updates: the key columns that are not the training's."""

    optimizer: str
    wrapper: str
    bucket_mb: int
    carrier: str = "backend"

    @classmethod
    def of(cls, optimizer: str, wrapper: str) -> Way:
        if wrapper == "torch_ddp":
            return cls(optimizer, wrapper, TORCH_MB)
        carrier = "copy_engines" if wrapper == "copy_engines" else "backend"
        return cls(optimizer, "bucketed", OURS_MB, carrier)

    @property
    def side(self) -> str:
        """The wrapper, whose optimizers take turns."""
        return "copy engines" if self.carrier == "copy_engines" else self.wrapper


def in_sides(ways: Iterable[Way]) -> dict[str, list[Way]]:
    """Those of one wrapper together."""
    sides: dict[str, list[Way]] = {}
    for way in ways:
        sides.setdefault(way.side, []).append(way)
    return sides


@dataclass(frozen=True)
class Asked:
    """The trainings whose steps are timed, and those whose memory is read, each with its ways."""

    times: Mapping[Training, list[Way]]
    memory: Mapping[Training, list[Way]]


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/sharded_optimizer.ipynb, in the order of its cell."""

    wrappers: str = parameter(
        "all",
        f"all, or from {', '.join(WRAPPERS)}: who averages gradients",
        kind=str,
        choices=("all",),
        many=WRAPPERS,
    )
    model: str = step_parameters.model(MODELS, "xl25", "GPUs")
    batch: int | None = data_parallel.batch()
    context: int | None = step_parameters.context(512, 16, "tokens of a sequence", "GPUs")
    capture: bool = data_parallel.capture()
    world_size: int = parameters.world_size()
    backend: str = parameters.backend()
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batches")

    def __post_init__(self) -> None:
        fixed = ("wrappers", "model", "batch", "context", "capture")
        parameters.refuse_beside_sweep(self, fixed)
        if self.capture and self.wrappers != "all" and "torch_ddp" in names(self.wrappers):
            raise ParameterError("capture = True: allowed without torch_ddp, which is launched")

    def asked(self) -> Asked:
        """What is to be measured, in order.

        Raises ParameterError for what these ranks cannot do.
        """
        ranks = parameters.ranks(self)
        if self.sweep != "shape":
            data_parallel.refuse_a_sweep(self.sweep, ranks)
            return _sweep(self.sweep, ranks)
        training = Training.asked(self, ranks)
        on_gpu = ranks.device == "cuda"
        wrappers = WRAPPERS if self.wrappers == "all" else names(self.wrappers)
        if self.wrappers == "all":
            wrappers = [w for w in wrappers if w != "copy_engines" or on_gpu]
            wrappers = [w for w in wrappers if w != "torch_ddp" or not self.capture]
        ways = [way for wrapper in wrappers for way in with_and_without(wrapper)]
        return Asked({training: ways}, {of_memory(training): ways})


def with_and_without(wrapper: str) -> tuple[Way, Way]:
    """The optimizer on every rank, and the one whose state is divided."""
    return Way.of("plain", wrapper), Way.of(
        "zero" if wrapper == "torch_ddp" else "sharded", wrapper
    )


def of_memory(training: Training) -> Training:
    """Where its memory is read: launched, and eager, of which every tensor is known."""
    return dataclasses.replace(training, compile="none", capture=False)


def _sweep(name: str, ranks: Ranks) -> Asked:
    """What answers most questions first."""
    usual = {capture: Training.usual(ranks, capture=capture) for capture in (True, False)}
    # As the handouts have it, of both editions.
    handout = [
        Training.usual(ranks, model=model, precision="fp32", attention="eager", compile="none")
        for model in ("xl25", "2.7B")
    ]
    ours, engines, peer = map(with_and_without, WRAPPERS)

    def times() -> Iterator[tuple[Training, Iterable[Way]]]:
        if name in ("essential", "all"):
            yield usual[True], (*engines, *ours)
            yield usual[False], (*ours, *peer)
        if name in ("handout", "all"):
            for training in handout:
                yield training, ours
        if name == "all":
            yield usual[False], engines

    def memory() -> Iterator[tuple[Training, Iterable[Way]]]:
        if name in ("essential", "memory", "all"):
            yield of_memory(usual[False]), (*ours, *peer)
        if name in ("handout", "all"):
            for training in handout:
                yield training, ours

    return Asked(data_parallel.merged(times()), data_parallel.merged(memory()))
