"""Trainings whose layout and speed were published, as input of the evaluator.

A row of data/reference/trainings.csv has a training's model, devices, layout and batch, and the
published speed. Where that is TFLOP/s, a step's seconds depend on which FLOPs were counted, and
Meta does not say which. No source states Llama 3's virtual stages; the rows have 8. With ``zero2``,
gradients are sent for every micro-batch, which is most of that model's time over the network: in
fp32, as its paper says. MPT's are sent in bf16, by the defaults of the script that timed them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.checks import check_name
from a2lib.shapes import PRESETS, GroupedShape, Shape, named_size
from a2lib.theory.devices import DEVICES, Device
from a2lib.theory.estimate import Estimate, evaluate, mfu, model_flops
from a2lib.theory.layouts import Layout, Training

GPT = "GPT"
UNITS = ("s", "TFLOP/s", "tokens/s a device")


@dataclass(frozen=True)
class PublishedRun:
    """One published training, and its speed as printed."""

    name: str
    training: Training
    layout: Layout
    device: Device
    value: float
    unit: str

    @property
    def estimate(self) -> Estimate:
        return evaluate(self.training, self.layout, self.device)

    def seconds(self, count: str = "causal") -> float:
        """Return a step's seconds as published, or computed from TFLOP/s by this count of FLOPs."""
        tokens = self.training.batch * self.training.context / self.layout.devices
        if self.unit == "s":
            return self.value
        if self.unit == "TFLOP/s":
            flops = model_flops(self.training, count) / self.layout.devices
            return flops / (self.value * 1e12)
        return tokens / self.value

    def ratio(self, count: str = "causal") -> float:
        """Return the published seconds over the estimated ones."""
        return self.seconds(count) / self.estimate.step_s

    def share(self, seconds: float, count: str = "causal") -> float:
        """Return the MFU of a step of so many seconds."""
        return mfu(self.training, self.layout, self.device, seconds, count)


def published_run(row: Mapping[str, object]) -> PublishedRun:
    """Return the training of a row. Raises ValueError for an unknown unit, and for a model with
    experts."""
    check_name("unit", row["unit"], UNITS)
    if int(row["expert"]) > 1:
        raise ValueError(f"{row['run']} has experts; allowed are dense models")
    training = Training(
        _shape(row),
        int(row["batch"]),
        int(row["context"]),
        attention=str(row["attention"]),
        sent_gradients=str(row["sent_gradients"]) or None,
    )
    layout = Layout(
        data=int(row["data"]),
        tensor=int(row["tensor"]),
        pipeline=int(row["pipeline"]),
        context=int(row["context_parallel"]),
        microbatches=int(row["microbatches"]),
        sharding=str(row["sharding"]),
        checkpointing=str(row["checkpointing"]),
        chunks=int(row["chunks"]),
        schedule=str(row["schedule"]),
    )
    speed = float(row["value"]), str(row["unit"])
    return PublishedRun(str(row["run"]), training, layout, DEVICES[str(row["device"])], *speed)


def _shape(row: Mapping[str, object]) -> Shape:
    """Return the shape of a preset, or of a GPT, whose feed-forward layer has no gate and is four
    times as wide as the model."""
    if row["model"] != GPT:
        return named_size(str(row["model"]), PRESETS)
    d = int(row["d_model"])
    return GroupedShape(
        d,
        4 * d,
        int(row["num_layers"]),
        int(row["num_heads"]),
        int(row["vocab_size"]),
        tied=True,
        gated=False,
    )
