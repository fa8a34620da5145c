"""What the experiment on fully sharded data parallel measures: a training, and who shards it. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.benchmark.configurations import MODELS
from a2lib.experiments.data_parallel import configurations as shared
from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import ParameterError, names, parameter
from a2lib.experiments.harness.ranks import Ranks

OURS, PEER = "fsdp", "fsdp2"
WRAPPERS = (OURS, PEER)
SWEEPS = ("xl25", "2.7B", "all")
# (the step, the moment in it) of a row of memory, in order. The first step has no moments of AdamW
# yet, and gathers nothing ahead.
STEADY = 3
MOMENTS = (
    *((0, "init"), (0, "before"), (0, "after")),
    *((STEADY, "forward"), (STEADY, "peak"), (STEADY, "before"), (STEADY, "after")),
)


@dataclass(frozen=True)
class Way:
    """Who shards the model: ``OURS`` or ``PEER``."""

    wrapper: str

    @property
    def label(self) -> str:
        return self.wrapper


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/fsdp.ipynb, in the order of its cell."""

    wrappers: str = parameter(
        "both",
        f"both, or from {', '.join(WRAPPERS)}; fsdp2 is PyTorch's fully_shard",
        kind=str,
        choices=("both",),
        many=WRAPPERS,
    )
    model: str = step_parameters.model(MODELS, "xl25", "GPUs")
    batch: int | None = shared.batch()
    context: int | None = step_parameters.context(512, 16, "tokens of a sequence", "GPUs")
    capture: bool = shared.capture()
    world_size: int = parameters.world_size()
    backend: str = parameters.backend()
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batches")

    def __post_init__(self) -> None:
        fixed = ("wrappers", "model", "batch", "context", "capture")
        parameters.refuse_beside_sweep(self, fixed)
        if self.capture and PEER in self._wrappers and self.wrappers != "both":
            raise ParameterError(f"capture = True: allowed without {PEER}, which is launched")

    @property
    def _wrappers(self) -> tuple[str, ...]:
        return WRAPPERS if self.wrappers == "both" else names(self.wrappers)

    def asked(self) -> dict[Training, list[Way]]:
        """The trainings, and the ways of each, in the order of measuring.

        Raises ParameterError for what these ranks cannot do.
        """
        ranks = parameters.ranks(self)
        if self.sweep != "shape":
            shared.refuse_a_sweep(self.sweep, ranks)
            return shared.merged(_sweep(self.sweep, ranks))
        training = Training.asked(self, ranks)
        return {training: _allowed(training, map(Way, self._wrappers))}


def _sweep(name: str, ranks: Ranks) -> Iterator[tuple[Training, Iterable[Way]]]:
    """What answers most questions first."""
    for model in SWEEPS[:-1] if name == "all" else (name,):
        for capture in (True, False):
            training = Training.usual(ranks, model=model, capture=capture)
            yield training, _allowed(training, map(Way, WRAPPERS))


def _allowed(training: Training, ways: Iterable[Way]) -> list[Way]:
    """PyTorch's own is launched, as its users run it."""
    return [way for way in ways if way.wrapper == OURS or not training.capture]


def held(training: Training, way: Way) -> tuple[dict[str, object], ...]:
    """The keys of the rows of memory, which are of launched steps."""
    key = training.key(way)
    del key["capture"]
    return tuple({**key, "step_number": step, "moment": moment} for step, moment in MOMENTS)
