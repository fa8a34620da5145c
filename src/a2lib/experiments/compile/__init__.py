"""The compile experiment: what the cells of notebooks/compile.ipynb call.

``settings`` says what is measured, ``attention`` and ``model`` how a worker does it, ``inductor``
how the compiler is watched.
"""

from __future__ import annotations

import dataclasses

from a2lib.experiments.benchmark.handlers import phases
from a2lib.experiments.compile.settings import Parameters
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.steps import refuse
from a2lib.measure import COMPILE_ATTENTION, COMPILE_MODEL

SHOWN = ("ms", "ms_cold", "ms_warm", "kernels_written", "kernels_called", "library_calls")
SAYS = "the median call, the first with nothing compiled yet and from the cache, what Inductor made"


def attention_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each shape, eager and compiled in turns."""
    return [
        Task(str(shape), {"shape": dataclasses.asdict(shape)}, shape.keys(), in_turns=True)
        for shape in given.shapes(device)
    ]


def model_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each model, its ways of compiling in turns."""
    made = []
    for steps in given.steps(device):
        rows = {
            way: tuple({**one.key(COMPILE_MODEL), "phase": phase} for phase in phases(one))
            for way in steps.ways
            for one in [steps.compiled(way)]
        }
        made.append(Task(str(steps.plain), dataclasses.asdict(steps), rows, in_turns=True))
    return made


ATTENTION = Table(
    COMPILE_ATTENTION,
    attention_tasks,
    says=f"Attention, eager and compiled: {SAYS}",
    shown=SHOWN,
    plot=Plot(x="seq_len", panels=("pass",)),
)
MODELS = Table(
    COMPILE_MODEL,
    model_tasks,
    says=f"The step of a model: {SAYS}",
    shown=SHOWN,
    silence_s=3600,  # of a large model compiled as one graph, minutes pass before anything is said
)
EXPERIMENT = Experiment(
    Parameters,
    (ATTENTION, MODELS),
    "torch.compile",
    tiny=lambda given: given.seq_len is None,
    refuse=refuse,
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_attention, draw = ATTENTION.measure_and_show, ATTENTION.draw
measure_models = MODELS.measure_and_show
