"""The attention experiment: what the cells of notebooks/attention.ipynb call.

``configurations`` says what is measured, ``handlers`` and ``limits`` how a worker does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from a2lib.experiments.attention.configurations import (
    ALLOCATORS,
    BATCH,
    DTYPE,
    PASSES,
    Parameters,
    Shape,
    head_dims,
    saved_tensors,
)
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.sweep import Key, Task
from a2lib.experiments.harness.view import Plot
from a2lib.measure import ATTENTION, ATTENTION_LIMIT, ATTENTION_SAVED


def pass_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each implementation and shape, both passes."""
    return [
        _task("", name, shape, ({"pass": one} for one in PASSES), calls=calls)
        for name, shape, calls in given.configurations(device)
    ]


def saved_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each implementation and shape, every tensor that it should save."""
    return [
        _task("saved by ", name, shape, ({"tensor": one} for one in saved_tensors(name, shape)))
        for name, shape, _ in given.configurations(device)
    ]


def limit_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each size, mask, pass and way to allocate."""
    made = []
    for allocator in ALLOCATORS if given.has("limit") else ():
        for causal in (False, True):
            for head_dim in head_dims(device):
                for pass_ in PASSES:
                    key = {
                        "implementation": "eager",
                        "dtype": DTYPE,
                        "batch": BATCH,
                        "head_dim": head_dim,
                        "causal": causal,
                        "pass": pass_,
                        "allocator": allocator,
                    }
                    label = f"limit of d = {head_dim}, {pass_}, {allocator}"
                    made.append(Task.whole(label + ", causal" * causal, {}, [key]))
    return made


def _task(what: str, name: str, shape: Shape, more: Iterable[Key], **how: object) -> Task:
    spec = {"implementation": name, "shape": dataclasses.asdict(shape), **how}
    return Task.whole(f"{what}{name} {shape}", spec, ({**shape.key(name), **one} for one in more))


PASSES_TIMED = Table(
    ATTENTION,
    pass_tasks,
    says="Each pass of attention by the host's clock, between events, replayed, and its memory",
    shown=("ms_mean", "ms_std", "ms", "n", "ms_event", "ms_graph", "ms_host")
    + ("held_bytes", "peak_bytes"),
    plot=Plot(x="seq_len", panels=("pass",)),
    keep_worker=True,
)
SAVED = Table(
    ATTENTION_SAVED,
    saved_tasks,
    says="What autograd saves for the backward pass, by tensor",
    shown=("saved_bytes",),
    across="tensor",
    keep_worker=True,
)
LIMIT = Table(
    ATTENTION_LIMIT,
    limit_tasks,
    says="The longest sequence that fits, predicted and found, in tokens",
    shown=("tensors_len", "predicted_len", "fits_len", "fails_len"),
)
EXPERIMENT = Experiment(
    Parameters,
    (PASSES_TIMED, SAVED, LIMIT),
    "Attention in plain PyTorch",
    tiny=lambda given: given.seq_len is None,
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_passes, show_passes, draw = PASSES_TIMED.measure, PASSES_TIMED.show, PASSES_TIMED.draw
measure_saved, measure_limit = SAVED.measure_and_show, LIMIT.measure_and_show
