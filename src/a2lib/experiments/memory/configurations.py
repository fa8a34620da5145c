"""What the memory experiment measures: its parameters, and the sweeps' configurations. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from a2lib.benchmark import PHASES, Config
from a2lib.experiments import step_parameters
from a2lib.experiments.benchmark.configurations import BATCH, MODELS
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import parameter
from a2lib.theory.memory.saved import PRECISIONS
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.memory.tensors import ATTENTIONS, MODES
from a2lib.theory.transformer import SIZES, Shape

SWEEPS = ("table", "recordings", "blocks", "sizes", "all")
STEPS = (0, 1)  # the first makes the optimizer's state, the second is as all later ones
# The handouts' contexts first.
LARGEST = {"cuda": "2.7B", "cpu": "tiny"}
CONTEXTS = {"cuda": (128, 512, 2048, 256, 1024), "cpu": (16, 32)}
ASKED = ("inference", "forward", "train-step")
BLOCK = "block"  # the mode of a recording of one block, its forward and backward
OTHERS = {"cuda": ("small", "medium", "large", "xl25", "10B"), "cpu": ()}


@dataclass(frozen=True)
class Case:
    """One configuration of a step; the fields are key columns of its rows."""

    model: str
    context: int
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    batch: int = BATCH

    def __str__(self) -> str:
        how = f"{self.mode} {self.precision} {self.attention}"
        return f"{self.model} {self.context} {how}"

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def picture(self) -> str:
        """How its bulk tables are named."""
        return "-".join([self.model, str(self.context), self.mode, self.precision, self.attention])

    def key(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def phases(self) -> tuple[str, ...]:
        """Those that have rows."""
        return (*PHASES[self.mode], "step")

    def counted(self, step: int = 1) -> StepMemory:
        """The same by the theory; raises ValueError for ``BLOCK``."""
        return StepMemory(self.shape, self.batch, self.context, self.mode, self.precision,
                          self.attention, first=step == 0)  # fmt: skip

    def config(self, device: str, seed: int) -> Config:
        sizes = {"size": self.model} if self.model in SIZES else dataclasses.asdict(self.shape)
        given = {name: getattr(self, name) for name in ("context", "batch", "mode", "precision")}
        return Config(**sizes, **given, attention=self.attention, device=device, seed=seed)


def table(device: str) -> list[Case]:
    """The handouts' model at every context, forward alone and a whole step, in either precision;
    and a step with our attention, which has no scores."""
    model = LARGEST[device]
    found = [
        Case(model, context, mode, precision)
        for context in CONTEXTS[device]
        for mode in ASKED
        for precision in PRECISIONS
    ]
    if device == "cuda":
        found += [Case(model, c, "train-step", "bf16", "flash") for c in CONTEXTS[device]]
    return found


def sizes(device: str) -> list[Case]:
    """The other models' forward and step."""
    return [
        Case(model, context, mode, precision)
        for model in OTHERS[device]
        for context in CONTEXTS[device]
        for mode in ("inference", "train-step")
        for precision in PRECISIONS
    ]


def recordings(device: str) -> list[Case]:
    """Steps whose every allocation is recorded: the one the chapter shows first, blocks last."""
    model = LARGEST[device]
    if device == "cpu":
        modes = "inference", "train-step", BLOCK
        return [Case(model, CONTEXTS[device][0], mode) for mode in modes]
    return [
        Case(model, 512, "train-step"),
        Case(model, 512, "inference"),
        Case(model, 128, "train-step"),
        Case(model, 512, "train-step", "bf16"),
        Case(model, 2048, "inference"),
        Case(model, 2048, "train-step", "bf16", "flash"),
        Case(model, 512, "forward"),
        Case(model, 128, "inference"),
        Case(model, 256, "train-step"),
        Case(model, 2048, BLOCK),
        Case(model, 128, BLOCK),
    ]


def blocks(device: str) -> list[Case]:
    """One block, by context, precision and attention; the mode is not used."""
    contexts = (2048, 128, 512, 256, 1024) if device == "cuda" else (16,)
    attentions = ATTENTIONS if device == "cuda" else ("eager",)
    precisions = PRECISIONS if device == "cuda" else ("fp32",)
    return [
        Case(LARGEST[device], context, "forward-backward", precision, attention)
        for context in contexts
        for precision in precisions
        for attention in attentions
    ]


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/memory.ipynb, in the order of its cell."""

    model: str = step_parameters.model(MODELS)
    context: int | None = step_parameters.context(512, 16)
    batch: int = step_parameters.batch(BATCH)
    mode: str = step_parameters.mode(MODES)
    precision: str = parameter("fp32", "fp32 or bf16 (autocast)", kind=str, choices=PRECISIONS)
    attention: str = parameter("eager", "eager or flash (ours)", kind=str, choices=ATTENTIONS)
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batch")

    def __post_init__(self) -> None:
        parameters.refuse_beside_sweep(self, [f.name for f in dataclasses.fields(Case)])

    def has(self, sweep: str) -> bool:
        return self.sweep in ("shape", sweep, "all")

    def cases(self, sweep: str, device: str) -> list[Case]:
        """Those of one part of what is asked for, in order; a single one where no sweep is."""
        if not self.has(sweep):
            return []
        if self.sweep != "shape":
            wanted = {"table": table, "sizes": sizes, "recordings": recordings, "blocks": blocks}
            return wanted[sweep](device)
        if sweep == "sizes":
            return []
        model = {"cuda": "small", "cpu": "tiny"}[device] if self.model == "auto" else self.model
        context = self.context or {"cuda": 512, "cpu": 16}[device]
        return [Case(model, context, self.mode, self.precision, self.attention, self.batch)]
