"""The checkpointing experiment: its parameters, what the sweeps measure, and what the cells of
notebooks/checkpointing.ipynb call. ``handlers`` is how a worker measures it.
"""

import dataclasses
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Experiment, Plot, Table, Task, parameters
from a2lib.experiments.harness.parameters import WithSweep, names, parameter
from a2lib.experiments.steps import MODELS, Configuration, refusals, refuse
from a2lib.experiments.workload import Config
from a2lib.lab import CHECKPOINTING
from a2lib.theory.memory.checkpointing import plan as plan_of

WARMUP, STEPS = 1, 3
TINY_LAYERS = 4  # of the CPU's model, so that segments of several sizes differ
MODEL = {"cuda": "2.7B", "cpu": "tiny"}
CONTEXT = {"cuda": 2048, "cpu": 16}
GRADIENTS = ("fresh", "kept")
SWEEPS = ("segments", "frontier", "depth", "fp32", "all")
# (precision, attention). TF32 products change no byte of fp32 and make its steps shorter.
WIDE = {"cuda": ("tf32", "eager"), "cpu": ("fp32", "eager")}
NARROW = {"cuda": ("bf16", "flash"), "cpu": ("bf16", "eager")}
# Single-level segments, the best and its neighbours first; what does not fit an H200 last.
SEGMENTS = {
    "cuda": ("block", "half", "segments:2", "segments:4", "segments:8", "segments:16"),
    "cpu": ("block", "half", "segments:2"),
}
# Beside those, of the same setting: two levels, the least memory with little work, and a selection.
BESIDE = {"cuda": ("nested:4", "recursive", "selective:linear"), "cpu": ("nested:2",)}
FRONTIER = {
    "cuda": ("none", "block", "half", "segments:2", "segments:4", "segments:8", "nested:4")
    + ("recursive", "selective:attention", "selective:linear", "chain"),
    "cpu": ("none", "block", "recursive", "selective:linear", "chain"),
}
# Blocks, and of the two-level strategy the segment near their root.
DEPTHS = {"cuda": {8: 2, 16: 4}, "cpu": {2: 1}}
SELECTIVE = ("linear", "products", "attention")
SIZES_OF_SEGMENTS = (1, 2, 3, 4, 6, 8, 16, 32)


@dataclass(frozen=True)
class Setting(Configuration):
    """A model of ``layers`` blocks and a batch, which several strategies are tried on."""

    layers: int = 0
    gradients: str = "fresh"

    def __str__(self) -> str:
        size = f"{self.model}, {self.layers} blocks, {self.context}"
        return f"{size}, {self.precision} {self.attention}, gradients {self.gradients}"

    def config(self, device: str, **others: object) -> Config:
        """The train-step that the benchmark would run; raises ValueError for what cannot be."""
        others |= {"num_layers": self.layers, "keep_gradients": self.gradients == "kept"}
        # Autocast's copies would outlive each segment.
        return super().config(device, autocast_cache=False, **others)


Planned = list[tuple[Setting, tuple[str, ...]]]


def blocks(model: str) -> int:
    return TINY_LAYERS if model == "tiny" else MODELS[model].num_layers


def _setting(device: str, way: tuple[str, str], gradients: str, layers: int = 0) -> Setting:
    model, (precision, attention) = MODEL[device], way
    how = {"precision": precision, "attention": attention, "gradients": gradients}
    return Setting(model, CONTEXT[device], layers=layers or blocks(model), **how)


def segments(device: str) -> Planned:
    """The best single-level segment and its neighbours, both ways with gradients."""
    fresh, kept = (_setting(device, WIDE[device], one) for one in GRADIENTS)
    first = [(fresh, (*SEGMENTS[device], "none")), (kept, SEGMENTS[device])]
    return first + [(fresh, BESIDE[device]), (kept, BESIDE[device])]


def frontier(device: str) -> Planned:
    """Every strategy where all of them fit."""
    return [(_setting(device, NARROW[device], one), FRONTIER[device]) for one in GRADIENTS]


def depth(device: str) -> Planned:
    """The strategies of least memory with fewer blocks, gradients kept; with all blocks they are in
    the frontier."""
    strategies = {
        n: ("block", f"nested:{k}", "recursive", "chain") for n, k in DEPTHS[device].items()
    }
    return [(_setting(device, NARROW[device], "kept", n), those) for n, those in strategies.items()]


def fp32(device: str) -> Planned:
    """The best segment and its neighbours with products in fp32, on a GPU."""
    if device == "cpu":
        return []
    return [(_setting(device, ("fp32", "eager"), "fresh"), SEGMENTS[device][:3])]


@dataclass(frozen=True)
class Parameters(WithSweep):
    beside = ("steps",)

    model: str = step_parameters.model("2.7B")
    layers: int | None = parameters.count(None, "blocks; None: the size's own", 10**4)
    context: int | None = step_parameters.context(2048, 16)
    batch: int = step_parameters.batch()
    precision: str = step_parameters.precision("bf16")
    attention: str = parameter(
        "auto",
        "eager, flash (ours); auto: flash on a GPU, eager on the CPU",
        choices=("auto", "eager", "flash"),
    )
    strategies: str = parameter(
        "block,half,segments:2",
        "a comma list; see a2lib.model.checkpointing",
        many=("none", "half", "block", "recursive", "chain")
        + tuple(f"selective:{ops}" for ops in SELECTIVE)
        + tuple(f"{name}:{k}" for name in ("segments", "nested") for k in SIZES_OF_SEGMENTS),
    )
    gradients: str = parameter(
        "fresh", "fresh: made by the backward; kept: there before", choices=GRADIENTS
    )
    steps: int = parameters.count(STEPS, "measured steps", 10**4)
    sweep: str = parameters.sweep(SWEEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("cuda")

    def check(self, device: str) -> None:
        """Raise ParameterError for what cannot be on ``device``, "cuda" or "cpu"."""
        refuse(self, device)
        with refusals():
            for setting, strategies in self.plan(device):
                setting.config(device)
                for strategy in strategies:
                    if not strategy.startswith("selective"):
                        plan_of(strategy, setting.layers)

    def plan(self, device: str) -> Planned:
        """Every setting asked for with its strategies, in order."""
        if self.sweep == "shape":
            attention = NARROW[device][1] if self.attention == "auto" else self.attention
            made = Setting.named(self, device, CONTEXT, MODEL["cuda"])
            how = {"attention": attention, "layers": made.layers or blocks(made.model)}
            return [(dataclasses.replace(made, **how), names(self.strategies))]
        sweeps = {"segments": segments, "frontier": frontier, "depth": depth, "fp32": fp32}
        return [planned for name, of in sweeps.items() if self.has(name) for planned in of(device)]


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


TIMES = Table(
    CHECKPOINTING,
    tasks,
    says="Time and memory of a step",
    shown=("ms", "ms_forward", "ms_backward")
    + ("held_bytes", "kept_bytes", "peak_bytes", "reserved_bytes"),
    plot=Plot(panels=("layers", "precision", "gradients")),
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "Checkpointing", Parameters.check)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
