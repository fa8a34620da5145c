"""The experiment on fully sharded data parallel: what notebooks/fsdp.ipynb calls."""

from dataclasses import dataclass

from a2lib.experiments.data_parallel import configurations as shared
from a2lib.experiments.data_parallel.configurations import FSDP as OURS
from a2lib.experiments.data_parallel.configurations import FSDP2, STEADY, Asked, Way
from a2lib.experiments.harness import Experiment, Plot, Table, parameters
from a2lib.experiments.harness.parameters import names, parameter
from a2lib.lab import FSDP, FSDP_MEMORY

WRAPPERS = (OURS, FSDP2)
SWEEPS = ("xl25", "2.7B", "all")
# (the step, the moment in it) of a row of memory, in order.
MOMENTS = (
    *((0, "init"), (0, "before"), (0, "after")),
    *((STEADY, "forward"), (STEADY, "peak"), (STEADY, "before"), (STEADY, "after")),
)


@dataclass(frozen=True)
class Parameters(shared.Asking):
    wrappers: str = parameter(
        "both",
        f"both, or from {', '.join(WRAPPERS)}; fsdp2 is PyTorch's fully_shard",
        choices=("both",),
        many=WRAPPERS,
    )
    sweep: str = parameters.sweep(SWEEPS)

    def asked(self) -> Asked:
        """The settings, each with its ways; raises ParameterError for what cannot be."""
        wrappers = WRAPPERS if self.wrappers == "both" else names(self.wrappers)
        return shared.asked(self, map(Way, wrappers), _sweep)


def _sweep(name: str, usual: shared.Usual) -> shared.Steps:
    for model in SWEEPS[:-1] if name == "all" else (name,):
        for capture in (True, False):
            yield usual(model=model, capture=capture), map(Way, WRAPPERS)


def memory_tasks(settings: Asked):
    """A task for each setting, launched; each way has the memory to itself. Where both are
    compared, so have whole models in the same setting."""
    both = {
        setting: (*ways, *map(Way, shared.WHOLE)) if len(ways) > 1 else ways
        for setting, ways in shared.launched(settings).items()
    }
    more = [{"step_number": step, "moment": moment} for step, moment in MOMENTS]
    return shared.tasks(FSDP_MEMORY, both, lambda setting: more)


MEMORY = Table(
    FSDP_MEMORY,
    lambda given, device: memory_tasks(given.asked()),
    says="What a rank holds at the moments of a step",
    shown=("parameter_bytes", "gradient_bytes", "optimizer_bytes", "whole_bytes")
    + ("travelling_bytes", "present_bytes", "tensor_bytes"),
    silence_s=shared.SILENCE_S,
    keep_worker=True,
)
TIMES = Table(
    FSDP,
    lambda given, device: shared.tasks(FSDP, given.asked()),
    says="The median step, beside that of one GPU with the model whole",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_waited", "ms_host")
    + ("ms_rank_min", "ms_rank_median", "ms_rank_max"),
    plot=Plot(beside=("ms_without",), panels=("model",)),
    silence_s=shared.SILENCE_S,
)
EXPERIMENT = Experiment(Parameters, (TIMES, MEMORY), "Fully sharded data parallel")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_memory = MEMORY.measure_and_show
measure_times, draw = TIMES.measure_and_show, TIMES.draw
