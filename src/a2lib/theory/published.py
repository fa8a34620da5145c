"""Trainings whose layout and speed were published, as jobs and layouts of the planner.

A row of data/reference/trainings.csv is one: its model, devices, layout and batch, and what was
published of its speed. A GPT's plain FFN, four times as wide as the model, has the parameters and
operations of a gated one of 8/3 of the width, and keeps as much (its input's product and that of
the nonlinearity: 8 widths), so it is planned as that, to the next multiple of 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from a2lib.theory.devices import named_device
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, Plan, evaluate, flops_share
from a2lib.theory.products import check_name
from a2lib.theory.transformer import PRESETS, GroupedShape, Shape, named_size, step_flops

GPT = "GPT"


@dataclass(frozen=True)
class Training:
    """One published training: what it was, and the seconds of a step by what was published."""

    name: str
    job: Job
    layout: Layout
    step_s: float

    @property
    def plan(self) -> Plan:
        return evaluate(self.job, self.layout)

    def share(self, seconds: float) -> float:
        """Of the peak, in this book's convention: half of the scores, nothing computed again."""
        return flops_share(self.job, self.layout, seconds)


def training(row: Mapping[str, object]) -> Training:
    """The training of a row. Raises ValueError, in one line, as ``Job`` and ``evaluate``, and for
    another unit than s, TFLOP/s and tokens/s a device."""
    axes = ("data", "tensor", "pipeline", "microbatches", "chunks", "expert")
    names = ("sharding", "checkpointing", "schedule")
    devices, batch, tokens = (int(row[name]) for name in ("devices", "batch", "context"))
    on, attention = named_device(str(row["device"])), str(row["attention"])
    job = Job(_shape(row), on, devices, batch, tokens, attention=attention, activations="fused")
    job = replace(job, headroom=0.03)  # such trainings fill their devices
    layout = Layout(
        context=int(row["context_parallel"]),
        **{name: int(row[name]) for name in axes},
        **{name: str(row[name]) for name in names},
    )
    value, unit = float(row["value"]), str(row["unit"])
    tokens = job.batch * job.context / layout.devices
    flops = step_flops(job.shape, job.batch, job.context, causal=True) / layout.devices
    seconds = {"s": value, "TFLOP/s": flops / value / 1e12, "tokens/s a device": tokens / value}
    check_name("unit", unit, seconds)
    return Training(str(row["run"]), job, layout, seconds[unit])


def _shape(row: Mapping[str, object]) -> Shape:
    if row["model"] != GPT:
        return named_size(str(row["model"]), PRESETS)
    d, layers, heads, vocabulary = (
        int(row[name]) for name in ("d_model", "num_layers", "num_heads", "vocab_size")
    )
    return GroupedShape(d, round(8 * d / 3 / 8) * 8, layers, heads, vocabulary, tied=True)
