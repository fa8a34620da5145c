"""What the memory experiment measures: its parameters, and the sweeps' configurations. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from a2lib.benchmark import PHASES
from a2lib.experiments import step_parameters
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import WithSweep, parameter
from a2lib.experiments.steps import BATCH, MODELS, Configuration
from a2lib.theory.memory.saved import PRECISIONS
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.memory.tensors import ATTENTIONS, MODES

SWEEPS = ("table", "recordings", "blocks", "sizes", "all")
STEPS = (0, 1)  # the first makes the optimizer's state, the second is as all later ones
# The handouts' contexts first.
LARGEST = {"cuda": "2.7B", "cpu": "tiny"}
CONTEXTS = {"cuda": (128, 512, 2048, 256, 1024), "cpu": (16, 32)}
ASKED = ("inference", "forward", "train-step")
BLOCK = "block"  # the mode of a recording of one block, its forward and backward
OTHERS = {"cuda": ("small", "medium", "large", "xl25", "10B"), "cpu": ()}


def picture(one: Configuration) -> str:
    """How the bulk tables of a configuration are named."""
    return "-".join([one.model, str(one.context), one.mode, one.precision, one.attention])


def phases(one: Configuration) -> tuple[str, ...]:
    """Those that have rows."""
    return (*PHASES[one.mode], "step")


def counted(one: Configuration, step: int = 1) -> StepMemory:
    """A configuration by the theory; raises ValueError for ``BLOCK``."""
    return StepMemory(
        one.shape, one.batch, one.context, one.mode, one.precision, one.attention, first=step == 0
    )


def _step(model: str, context: int, *way: str) -> Configuration:
    """By mode, precision and attention, the usual ones where none is given."""
    return Configuration(model, context, BATCH, *way)


def table(device: str) -> list[Configuration]:
    """The handouts' model at every context, forward alone and a whole step, in either precision;
    and a step with our attention, which has no scores."""
    model = LARGEST[device]
    found = [
        _step(model, context, mode, precision)
        for context in CONTEXTS[device]
        for mode in ASKED
        for precision in PRECISIONS
    ]
    if device == "cuda":
        found += [_step(model, c, "train-step", "bf16", "flash") for c in CONTEXTS[device]]
    return found


def sizes(device: str) -> list[Configuration]:
    """The other models' forward and step."""
    return [
        _step(model, context, mode, precision)
        for model in OTHERS[device]
        for context in CONTEXTS[device]
        for mode in ("inference", "train-step")
        for precision in PRECISIONS
    ]


def recordings(device: str) -> list[Configuration]:
    """Steps whose every allocation is recorded: the one the chapter shows first, blocks last."""
    model = LARGEST[device]
    if device == "cpu":
        modes = "inference", "train-step", BLOCK
        return [_step(model, CONTEXTS[device][0], mode) for mode in modes]
    return [
        _step(model, 512, "train-step"),
        _step(model, 512, "inference"),
        _step(model, 128, "train-step"),
        _step(model, 512, "train-step", "bf16"),
        _step(model, 2048, "inference"),
        _step(model, 2048, "train-step", "bf16", "flash"),
        _step(model, 512, "forward"),
        _step(model, 128, "inference"),
        _step(model, 256, "train-step"),
        _step(model, 2048, BLOCK),
        _step(model, 128, BLOCK),
    ]


def blocks(device: str) -> list[Configuration]:
    """One block, by context, precision and attention; the mode is not used."""
    contexts = (2048, 128, 512, 256, 1024) if device == "cuda" else (16,)
    attentions = ATTENTIONS if device == "cuda" else ("eager",)
    precisions = PRECISIONS if device == "cuda" else ("fp32",)
    return [
        _step(LARGEST[device], context, "forward-backward", precision, attention)
        for context in contexts
        for precision in precisions
        for attention in attentions
    ]


@dataclass(frozen=True)
class Parameters(WithSweep):
    """The parameters of notebooks/memory.ipynb, in the order of its cell."""

    model: str = step_parameters.model(MODELS)
    context: int | None = step_parameters.context(512, 16)
    batch: int = step_parameters.batch(BATCH)
    mode: str = step_parameters.mode(MODES)
    precision: str = parameter("fp32", "fp32 or bf16 (autocast)", choices=PRECISIONS)
    attention: str = parameter("eager", "eager or flash (ours)", choices=ATTENTIONS)
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batch")

    def configurations(self, sweep: str, device: str) -> list[Configuration]:
        """Those of one part of what is asked for, in order; a single one where no sweep is."""
        if self.sweep == "shape" and sweep != "sizes":
            return [Configuration.named(self, device, {"cuda": 512, "cpu": 16})]
        wanted = {"table": table, "sizes": sizes, "recordings": recordings, "blocks": blocks}
        return wanted[sweep](device) if self.has(sweep) else []
