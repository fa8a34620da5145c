"""What the benchmark experiment measures: its parameters, and the sweeps' configurations. No torch.

parameters.configurations("cuda")        # in the order in which they are measured
"""

from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.benchmark.config import MOST_STEPS, WEIGHTS
from a2lib.experiments import step_parameters
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import WithSweep, parameter
from a2lib.experiments.steps import MODES, OVERLAPPED, TOO_LARGE, Configuration, refusals
from a2lib.theory.roofline import NARROW
from a2lib.theory.transformer import SIZES

WARMUP, STEPS = 5, 10
SWEEPS = ("table", "columns", "warmup", "first", "power", "all")
# The 8B model is that of the leaderboard of 2026, which has a batch of its own.
TABLE = {"cuda": tuple(name for name in SIZES if name != "8B"), "cpu": ("tiny",)}
# Where implementations are compared first: the context of the handout's other questions.
COMPARED = {"cuda": 512, "cpu": 32}
CONTEXTS = {"cuda": (128, 256, 512, 1024), "cpu": (16, 32)}
# Values of ``WAY``, beside the plain column of the table. A captured step is
# the GPU's own time of the one above it.
WAY = ("precision", "attention", "compile", "capture")
COLUMNS = {
    "cuda": (
        ("fp32", "eager", "none", True),
        ("tf32", "eager", "none", False),
        ("bf16", "eager", "none", False),
        ("bf16", "flash", "none", False),
        ("bf16", "sdpa_flash", "blocks", False),
        ("bf16", "sdpa_flash", "blocks", True),
        ("bf16", "flash", "blocks", False),
        ("bf16", "flash", "blocks", True),
    ),
    "cpu": (("bf16", "eager", "none", False),),
}
# (precision, attention, compile) whose GPU time is told apart by phase: each mode captured, the
# longer less the shorter one. At ``COMPARED`` alone.
REPLAYED = {
    "cuda": (
        ("fp32", "eager", "none"),
        ("tf32", "eager", "none"),
        ("bf16", "eager", "none"),
        ("bf16", "flash", "blocks"),
    ),
    "cpu": (),
}
# (precision, mode) of this library's optimizer, beside the last of the columns.
UPDATED = {
    "cuda": ((NARROW, "train-step"), (NARROW, OVERLAPPED), ("bf16", OVERLAPPED)),
    "cpu": ((NARROW, OVERLAPPED),),
}
# Each is a process, in which first steps are as first as in any other.
WARMUPS = {"cuda": (0, 1, 2, 3, 5), "cpu": (0, 2)}
# Where the first step is taken apart: a model that the host holds up, and the largest that trains.
FIRST = {"cuda": ("small", "2.7B"), "cpu": ("tiny",)}
FIRST_COMPILED = {"cuda": ("small",), "cpu": ()}
# Each with what those before it have done; `modules` stands apart.
LADDER = {"cuda": ("nothing", "product", "block", "memory"), "cpu": ("nothing", "block")}
REPEATS = {"cuda": 3, "cpu": 1}
# Whose energy is measured, replayed from a CUDA graph: (precision, attention, mode), of which the
# third is what the two below it have beside their updates.
POWERED = {"cuda": ("xl25", "2.7B"), "cpu": ("tiny",)}
POWERED_WAYS = {
    "cuda": (
        ("bf16", "sdpa_flash", "train-step"),
        ("bf16", "flash", "train-step"),
        (NARROW, "flash", "forward-backward"),
        (NARROW, "flash", "train-step"),
        (NARROW, "flash", OVERLAPPED),
    ),
    "cpu": (("fp32", "eager", "train-step"),),
}
# Those of the last model that are measured again with all weights zero.
LOADED_WAYS = {"cuda": POWERED_WAYS["cuda"][3:], "cpu": POWERED_WAYS["cpu"]}
# Steps until clock and power have settled, of some seconds, and those that are measured: many,
# since the driver's counter of energy moves by itself and not with the steps.
SETTLED = {"cuda": (40, 60), "cpu": (1, 2)}


def smallest_first(found: Iterable[Configuration]) -> list[Configuration]:
    return sorted(found, key=Configuration.work)


def table(device: str) -> list[Configuration]:
    """Every size, context and mode in plain fp32."""
    sizes = {"model": TABLE[device], "context": CONTEXTS[device]}
    return smallest_first(Configuration.every(**sizes, mode=MODES))


def columns(device: str) -> list[Configuration]:
    """The train-step of every size and context in the other ways of running it, every mode of
    those in ``REPLAYED``, and the steps of ``UPDATED``.

    Those at ``COMPARED`` come first, then what is compiled or captured, then the rest; the model
    that is too large is at ``COMPARED`` alone: elsewhere nothing would be tried."""
    compared, models, named = COMPARED[device], TABLE[device], Configuration.every
    every = named(model=models, context=CONTEXTS[device], way=_ways(COLUMNS[device]))
    steps = [one for one in every if one.model != TOO_LARGE or one.context == compared]
    here = {"model": models, "context": [compared]}
    replayed = named(**here, mode=MODES, way=_ways(REPLAYED[device]), capture=[True])
    (last,) = _ways(COLUMNS[device][-1:])
    ways = [{**last, "precision": p, "mode": mode} for p, mode in UPDATED[device]]
    updated = named(**here, way=ways)

    def place(one: Configuration) -> tuple[bool, bool]:
        compiled = one.compile != "none" or one.capture
        elsewhere = one.context != compared
        return elsewhere, elsewhere and not compiled

    return sorted(smallest_first(dict.fromkeys([*steps, *replayed, *updated])), key=place)


def _ways(columns: Iterable[tuple]) -> list[dict[str, object]]:
    return [dict(zip(WAY, one, strict=False)) for one in columns]


def warmups(device: str) -> list[Configuration]:
    """The train-steps whose every step is kept, by ``WARMUPS``: where implementations are compared,
    and at the shortest context."""
    models = [name for name in TABLE[device] if name != TOO_LARGE]
    contexts = COMPARED[device], CONTEXTS[device][0]
    return [Configuration(name, context) for context in contexts for name in models]


def firsts(device: str) -> list[tuple[Configuration, str]]:
    """(configuration, what is prepared) for each process that takes a first step apart."""
    context = CONTEXTS[device][0]
    ladder = LADDER[device] + (("modules",) if device == "cuda" else ())
    found = [(Configuration(m, context), p) for m in FIRST[device] for p in ladder]
    compiled = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
    return found + [
        (Configuration(model, context, **compiled), prepared)
        for model in FIRST_COMPILED[device]
        for prepared in ("nothing", "cached")
    ]


def powers(device: str) -> list[Configuration]:
    """The steps whose energy is measured."""
    return [_fast(device, model, *way) for model in POWERED[device] for way in POWERED_WAYS[device]]


def loads(device: str) -> list[tuple[Configuration, str]]:
    """Those whose energy is compared with that of the same work on zeros, and the weights."""
    model = POWERED[device][-1]
    return [(_fast(device, model, *way), w) for way in LOADED_WAYS[device] for w in WEIGHTS]


def _fast(device: str, model: str, precision: str, attention: str, mode: str) -> Configuration:
    """Compiled and captured on a GPU."""
    fast = {"compile": "blocks", "capture": True} if device == "cuda" else {}
    given = {"mode": mode, "precision": precision, "attention": attention}
    return Configuration(model, COMPARED[device], **given, **fast)


@dataclass(frozen=True)
class Parameters(WithSweep):
    model: str = step_parameters.model()
    context: int | None = step_parameters.context(512, 32)
    batch: int = step_parameters.batch()
    mode: str = step_parameters.mode((*MODES, OVERLAPPED))
    precision: str = step_parameters.any_precision()
    attention: str = step_parameters.attention()
    compile: str = step_parameters.compiled()
    capture: bool = parameter(False, "replay the whole step from a CUDA graph")
    warmup: int = parameters.count(WARMUP, "steps before the measured ones", MOST_STEPS, 0)
    steps: int = parameters.count(STEPS, "measured steps", MOST_STEPS)
    sweep: str = parameters.sweep(SWEEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        with refusals():
            self.shape("cuda").config("cuda", warmup=self.warmup, steps=self.steps)

    def shape(self, device: str) -> Configuration:
        """The configuration that the parameters name on ``device``, "cuda" or "cpu"."""
        return Configuration.named(self, device, COMPARED)

    def configurations(self, device: str) -> list[Configuration]:
        """Those of the ``benchmark`` table, in order."""
        if self.sweep == "shape":
            return [self.shape(device)]
        wanted = {"table": table, "columns": columns}
        return [c for name, of in wanted.items() if self.has(name) for c in of(device)]
