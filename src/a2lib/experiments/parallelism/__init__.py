"""The experiment on parallelism: what notebooks/parallelism.ipynb calls.

``configurations`` says what is measured, ``schemes`` how the layers are spread, ``peers`` has
PyTorch's ways of it, ``handlers`` what each rank does with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.parallelism.configurations import PASSES, Parameters, Stack
from a2lib.measure import PARALLELISM


def tasks(asked: Mapping[Stack, list[int]]) -> list[Task]:
    """A task for each stack, each batch its own culprit."""
    made = []
    for stack, batches in asked.items():
        passes = PASSES[stack.implementation]
        rows = {f"{n} tokens": tuple(stack.key(n, one) for one in passes) for n in batches}
        label = f"{stack.label}, {stack.ranks.backend} {stack.ranks.world_size}"
        made.append(Task(label, stack.spec(), rows, ranks=stack.ranks))
    return made


def hidden(row: Mapping[str, str]) -> float | None:
    """The part of the shorter of computation and messages that the other one hides."""
    if not row["ms_communication"]:
        return None
    ms, alone, sent = (float(row[c]) for c in ("ms", "ms_without", "ms_communication"))
    return (alone + sent - ms) / min(alone, sent)


TIMES = Table(
    PARALLELISM,
    lambda given, device: tasks(given.asked()),
    says="The median pass, and its computation and messages by themselves",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_communication"),
    derived={"hidden": hidden},
    plot=Plot(x="tokens", beside=("ms_without", "ms_communication"), panels=("scheme", "mesh")),
    silence_s=180,  # making the layers and the groups of a mesh, or timing one batch
)
EXPERIMENT = Experiment(
    Parameters,
    (TIMES,),
    "Do the formulas hold?",
    tiny=lambda given: False,
    ranks=lambda given: [stack.ranks for stack in given.asked()],
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
