"""The checkpointing experiment: what the cells of notebooks/checkpointing.ipynb call.

``configurations`` says what is measured, ``handlers`` how a worker does it.
"""

from __future__ import annotations

import dataclasses

from a2lib.experiments.checkpointing.configurations import Parameters
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.measure import CHECKPOINTING


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task, and so a model that is built, for each setting; its strategies are the culprits."""
    return [
        Task(
            str(setting),
            {"setting": dataclasses.asdict(setting), "steps": given.steps},
            {name: ({**setting.key(CHECKPOINTING), "strategy": name},) for name in strategies},
        )
        for setting, strategies in given.plan(device)
    ]


STEPS = Table(
    CHECKPOINTING,
    tasks,
    says="Time and memory of a step",
    shown=("ms", "ms_forward", "ms_backward")
    + ("held_bytes", "kept_bytes", "peak_bytes", "reserved_bytes"),
    plot=Plot(panels=("layers", "precision", "gradients")),
)
EXPERIMENT = Experiment(
    Parameters,
    (STEPS,),
    "Checkpointing",
    tiny=lambda given: given.model == "auto",
    refuse=Parameters.check,
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = STEPS.measure, STEPS.show, STEPS.draw
