"""The experiment on data parallelism: what notebooks/ddp.ipynb calls.

``configurations`` says what is measured, ``wrappers`` how gradients are averaged, ``handlers`` what
each rank does with it. The training and the turns are ``experiments/data_parallel``'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.ddp.configurations import Parameters, Way
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.measure import DDP


def tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training, each way its own culprit."""
    return [
        Task(
            training.label,
            training.spec(),
            {way.label: (training.key(way),) for way in ways},
            ranks=training.ranks,
        )
        for training, ways in asked.items()
    ]


TIMES = Table(
    DDP,
    lambda given, device: tasks(given.asked()),
    says="The median step, and the same step without communication",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_communication", "ms_backward_without")
    + ("ms_host", "ms_rank_min", "ms_rank_median", "ms_rank_max"),
    derived={"exposed": lambda row: float(row["ms"]) - float(row["ms_without"])},
    plot=Plot(panels=("model", "capture", "precision")),
    silence_s=240,  # making and compiling a model, or capturing a step of one
)
EXPERIMENT = Experiment(
    Parameters,
    (TIMES,),
    "Distributed data parallel",
    ranks=lambda given: [training.ranks for training in given.asked()],
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
