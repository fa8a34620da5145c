"""Memory and time of a training step in a layout: ``evaluate(training, layout, device)``.

    from a2lib.theory.devices import DEVICES
    from a2lib.theory.estimate import evaluate, mfu
    from a2lib.theory.layouts import Layout, Training
    from a2lib.shapes import PRESETS

    training = Training(PRESETS["Llama-3-8B"], batch=128, context=8192)
    step = evaluate(training, Layout(data=16, sharding="fsdp"), DEVICES["H100"])
    step.memory, step.time.work, step.time.messages, step.step_s

A model is a ``a2lib.shapes.GroupedShape``; devices and networks of one's own are in devices.py.
published.py compares published trainings of dense models with the estimate.
"""

from dataclasses import dataclass

from a2lib.checks import check_name
from a2lib.theory.devices import Device
from a2lib.theory.layout_memory import memory
from a2lib.theory.layout_time import StepTime, step_time
from a2lib.theory.layouts import Case, Layout, Training, check
from a2lib.theory.transformer import parameter_count, step_flops

# Model FLOPs may count half of the attention scores, as a causal model needs; all of them
# (Megatron, PaLM, torchtitan); or six per parameter, and none for attention.
FLOP_COUNTS = ("causal", "full", "6ND")


@dataclass(frozen=True)
class Estimate:
    """Bytes by component at the largest peak of a device, and a step's time."""

    memory: dict[str, float]
    time: StepTime

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """Return the step's seconds if half of what can hide does."""
        return self.time.seconds()


def evaluate(training: Training, layout: Layout, device: Device) -> Estimate:
    """Return the estimate of a layout, whether or not it fits. Raises ValueError, in one line, for
    a layout that breaks a rule."""
    case = Case(training, layout, device)
    check(case)
    return Estimate(memory(case), step_time(case))


def model_flops(training: Training, count: str = "causal") -> float:
    """Return the FLOPs of a step that the model needs, by one of ``FLOP_COUNTS``; recomputation
    counts in none of them."""
    check_name("count", count, FLOP_COUNTS)
    shape, batch, context = training.shape, training.batch, training.context
    if count == "6ND":
        return 6 * parameter_count(shape) * batch * context
    return step_flops(shape, batch, context, causal=count == "causal")


def mfu(
    training: Training, layout: Layout, device: Device, seconds: float, count: str = "causal"
) -> float:
    """Return the MFU (model FLOPs utilization) of a step of so many seconds: ``model_flops`` over
    what the devices could compute at the data sheet's peak."""
    return model_flops(training, count) / (layout.devices * device.flops * seconds)
