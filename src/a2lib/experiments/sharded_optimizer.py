"""The experiment on the sharded optimizer: what notebooks/sharded_optimizer.ipynb calls."""

import dataclasses
from dataclasses import dataclass

from a2lib.experiments.data_parallel import configurations as shared
from a2lib.experiments.data_parallel.configurations import BEST_MB, TORCH_MB, Asked, Setting, Way
from a2lib.experiments.harness import Experiment, Plot, Table, parameters
from a2lib.experiments.harness.parameters import names, parameter
from a2lib.lab import SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY


def _both(way: Way, divided: str) -> tuple[Way, Way]:
    """The optimizer on every rank, and the one whose state is divided."""
    return way, dataclasses.replace(way, optimizer=divided)


WAYS = {
    "bucketed": _both(Way("bucketed", BEST_MB), "sharded"),
    "copy_engines": _both(Way("bucketed", BEST_MB, "copy_engines"), "sharded"),
    "torch_ddp": _both(Way("torch_ddp", TORCH_MB), "zero"),  # is made for PyTorch's wrapper
}
SWEEPS = ("essential", "memory", "handout", "all")
MOMENTS = ("init", "before", "after", "step")


@dataclass(frozen=True)
class Parameters(shared.Asking):
    wrappers: str = parameter(
        "all",
        f"all, or from {', '.join(WAYS)}: who averages gradients",
        choices=("all",),
        many=tuple(WAYS),
    )
    sweep: str = parameters.sweep(SWEEPS)

    def times(self) -> Asked:
        """The settings whose steps are timed; raises ParameterError for what cannot be."""
        return shared.asked(self, self._ways(), _times)

    def memory(self) -> Asked:
        """Those whose memory is read: launched, and eager, of which every tensor is known."""
        return shared.launched(shared.asked(self, self._ways(), _memory), compile="none")

    def _ways(self) -> list[Way]:
        device = self.ranks().device
        here = [wrapper for wrapper in WAYS if wrapper != "copy_engines" or device == "cuda"]
        wrappers = here if self.wrappers == "all" else names(self.wrappers)
        return [way for wrapper in wrappers for way in WAYS[wrapper]]


_OURS, _ENGINES, _PEER = WAYS.values()


def _times(name: str, usual: shared.Usual) -> shared.Steps:
    if name in ("essential", "all"):
        yield usual(capture=True), (*_ENGINES, *_OURS)
        yield usual(), (*_OURS, *_PEER)
    yield from _handout(name, usual)
    if name == "all":
        yield usual(), _ENGINES


def _memory(name: str, usual: shared.Usual) -> shared.Steps:
    if name in ("essential", "memory", "all"):
        yield usual(), (*_OURS, *_PEER)
    yield from _handout(name, usual)


def _handout(name: str, usual: shared.Usual) -> shared.Steps:
    for model in ("xl25", "2.7B") if name in ("handout", "all") else ():
        yield usual(model=model, **shared.PLAIN), _OURS


def memory_tasks(settings: Asked):
    """A task for each setting, each way its own culprit: every moment on every rank."""

    def more(setting: Setting) -> list[dict[str, object]]:
        ranks = range(setting.ranks.world_size)
        return [{"moment": moment, "on_rank": rank} for moment in MOMENTS for rank in ranks]

    return shared.tasks(SHARDED_OPTIMIZER_MEMORY, settings, more)


MEMORY = Table(
    SHARDED_OPTIMIZER_MEMORY,
    lambda given, device: memory_tasks(given.memory()),
    says="What each rank holds at the moments of a step, and sends in it",
    shown=("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
    + ("present_bytes", "tensor_bytes", "reduced_bytes", "gathered_bytes", "broadcast_bytes"),
    plot=Plot("optimizer_bytes", ("parameter_bytes", "gradient_bytes"), panels=("moment",)),
    silence_s=shared.SILENCE_S,
    keep_worker=True,
)
TIMES = Table(
    SHARDED_OPTIMIZER,
    lambda given, device: shared.tasks(SHARDED_OPTIMIZER, given.times()),
    says="The median step, and its optimizer",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_optimizer", "ms_host")
    + ("ms_rank_min", "ms_rank_median", "ms_rank_max"),
    silence_s=shared.SILENCE_S,
)
EXPERIMENT = Experiment(Parameters, (TIMES, MEMORY), "A sharded optimizer")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_memory, show_memory, draw = MEMORY.measure, MEMORY.show, MEMORY.draw
measure_times, show_times = TIMES.measure, TIMES.show
