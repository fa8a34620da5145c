"""The leaderboard's step: what notebooks/leaderboard.ipynb calls.

``configurations`` has the ladder of ways, ``training`` the step, ``handlers`` what each rank does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from a2lib.experiments.benchmark.configurations import MODELS
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.leaderboard.configurations import Parameters
from a2lib.measure import LEADERBOARD
from a2lib.theory.transformer import step_flops


def tasks(given: Parameters) -> list[Task]:
    """A task for each way: one that runs out of memory ends its processes alone."""
    return [
        Task(step.way.name, given.spec(step), {step.way.name: (step.key(),)}, ranks=step.ranks)
        for step in given.asked()
    ]


def tflops(row: Mapping[str, str]) -> float:
    """10**12 operations a second of a GPU that the step needs: the model's, by forward and
    backward, causal attention half, and nothing that is computed again."""
    shape = dataclasses.replace(MODELS[row["model"]], num_layers=int(row["layers"]))
    flops = step_flops(shape, int(row["batch"]), int(row["context"]), causal=True)
    return flops / float(row["ms"]) / 1e9


TIMES = Table(
    LEADERBOARD,
    lambda given, device: tasks(given),
    says="The median step; a rate counts what a step needs, not what is computed again",
    shown=("ms", "ms_mean", "n", "ms_forward", "ms_backward", "ms_optimizer", "allocated_bytes")
    + ("kept_bytes", "host_bytes", "products_again", "ms_ready", "loss", "gradient_norm"),
    derived={"TFLOP/s": tflops},
    plot=Plot(),
    silence_s=600,  # making and sharding a model, compiling its blocks, or all timed steps
)
EXPERIMENT = Experiment(
    Parameters,
    (TIMES,),
    "the leaderboard's step",
    ranks=lambda given: [step.ranks for step in given.asked()],
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
