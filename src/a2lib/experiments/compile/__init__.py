"""The compile experiment: its parameters, what the sweeps measure, and what the cells of
notebooks/compile.ipynb call.

``attention`` and ``model`` are how a worker measures it.
"""

import dataclasses
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Experiment, Plot, Table, Task, parameters
from a2lib.experiments.harness.parameters import WithSweep, parameter
from a2lib.experiments.steps import BATCH as STEP_BATCH
from a2lib.experiments.steps import MODELS, MODES, TOO_LARGE, Configuration, refuse
from a2lib.lab import COMPILE_ATTENTION, COMPILE_MODEL
from a2lib.theory.eager import IMPLEMENTATIONS, PASSES, WRITTEN

BATCH = 8
# The handout's grid; the CPU's shows that everything works.
SEQ_LENS = {"cuda": (256, 1024, 4096, 8192, 16384), "cpu": (32, 64)}
HEAD_DIMS = {"cuda": (64, 16, 128, 32), "cpu": (16,)}
SWEEPS = ("attention", "written", "models", "bf16", "contexts", "10B", "all")
# 10B trains on no such GPU, and 8B has a batch of its own.
TRAINED = {"cuda": ("small", "medium", "large", "xl25", "2.7B"), "cpu": ("tiny",)}
# As one graph beyond small: that of most parameters first, of which others have published a gain.
WHOLE = ("2.7B", "medium", "large", "xl25")
CONTEXT = {"cuda": 512, "cpu": 16}
# Beside CONTEXT on a GPU, where one compiled block tells how the gain goes with the length.
CONTEXTS = (128, 1024)
WARMUP, STEPS = 3, 5
BLOCKS = ("none", "blocks")  # the ways to compile any model


@dataclass(frozen=True)
class Shape:
    """One shape of attention over ``batch`` sequences without heads, ``written`` as
    ``theory.eager`` says."""

    written: str
    dtype: str
    seq_len: int
    head_dim: int
    batch: int = BATCH

    def __str__(self) -> str:
        return f"{self.written} {self.dtype} {self.seq_len}x{self.head_dim}"

    @property
    def causal(self) -> bool:
        return self.written == "causal"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of q, k and v."""
        one_head = (1,) if self.written == "heads" else ()
        return self.batch, *one_head, self.seq_len, self.head_dim

    def keys(self) -> dict[str, tuple[dict[str, object], ...]]:
        """The keys of its rows, by implementation."""
        shape = dataclasses.asdict(self)
        return {
            name: tuple({"implementation": name, **shape, "pass": p} for p in PASSES)
            for name in IMPLEMENTATIONS
        }


def grid(device: str) -> list[Shape]:
    """The handout's: every length of a head size before the next, since it is by the length that
    the answer goes."""
    return [Shape("plain", "fp32", n, d) for d in HEAD_DIMS[device] for n in SEQ_LENS[device]]


def lines(device: str, *which: tuple[str, str]) -> list[Shape]:
    """For each (written, dtype) the first head size at every length, and at the longest those of
    which the page has floors: the smallest and the largest."""
    first, *others = HEAD_DIMS[device]
    ends = {min(others), max(others)} if others else ()
    every = [(n, first) for n in SEQ_LENS[device]]
    every += [(SEQ_LENS[device][-1], d) for d in sorted(ends)]
    return [Shape(written, dtype, n, d) for written, dtype in which for n, d in every]


@dataclass(frozen=True)
class Steps:
    """The steps of one model, in each of the ``ways`` that ``workload`` can compile it; once
    more from the cache that this filled, unless not ``cached``."""

    plain: Configuration
    ways: tuple[str, ...] = BLOCKS
    cached: bool = True

    def compiled(self, way: str) -> Configuration:
        return dataclasses.replace(self.plain, compile=way)


def model_steps(sweep: str, device: str) -> list[Steps]:
    """Those of a sweep, the smallest model first; larger ones as one graph, which takes minutes to
    compile, after the blocks of all, once each and the one with the most blocks last."""
    found, context = [], CONTEXT[device]

    def train(model: str, precision: str = "fp32") -> Steps:
        whole = ("model",) if model == "small" else ()
        return Steps(Configuration(model, context, precision=precision), (*BLOCKS, *whole))

    def whole(model: str, mode: str = "train-step") -> Steps:
        return Steps(Configuration(model, context, mode=mode), ("model",), cached=False)

    if sweep in ("models", "all"):
        found += [train(model) for model in TRAINED[device]]
        found += [whole(model) for model in WHOLE if device == "cuda"]
    if device == "cpu":
        return found
    if sweep in ("bf16", "all"):
        # One block tells the gain of all; the whole graph is compiled where that takes seconds.
        found += [train(model, "bf16") for model in TRAINED[device]]
    if sweep in ("contexts", "all"):
        found += map(Steps, Configuration.every(model=("small", "2.7B"), context=CONTEXTS))
    if sweep in (TOO_LARGE, "all"):
        one = {"model": [TOO_LARGE], "context": [context]}
        ways = {"precision": ("fp32", "bf16"), "mode": MODES[:2]}
        found += map(Steps, Configuration.every(**one, **ways))
        found.append(whole(TOO_LARGE, MODES[0]))
    return found


@dataclass(frozen=True)
class Parameters(WithSweep):
    written: str = parameter(
        "plain", "plain, causal (a mask), or heads (a dimension of one head)", choices=WRITTEN
    )
    dtype: str = parameter("fp32", "fp32 or bf16", choices=("fp32", "bf16"))
    batch: int = parameters.count(BATCH, "sequences of attention", 2**16)
    seq_len: int | None = parameters.count(
        None, "tokens of attention; None: 4096 on a GPU, 64 on the CPU", 2**20
    )
    head_dim: int = parameters.count(64, "size of the head", 1024)
    model: str = parameter(
        "auto",
        "a size by name, or none; auto: small on a GPU, tiny on the CPU",
        choices=("auto", "none", *MODELS),
    )
    context: int | None = step_parameters.context(512, 16, "tokens of the model")
    precision: str = step_parameters.precision("fp32", "of the model: fp32, tf32 or bf16")
    mode: str = step_parameters.mode(MODES)
    sweep: str = parameters.sweep(SWEEPS, "those above")

    def shapes(self, device: str) -> list[Shape]:
        """Those of attention, in order."""
        if self.sweep == "shape":
            length = self.seq_len or {"cuda": 4096, "cpu": 64}[device]
            return [Shape(self.written, self.dtype, length, self.head_dim, self.batch)]
        found = grid(device) if self.has("attention") else []
        others = ("heads", "fp32"), ("causal", "fp32"), ("plain", "bf16")
        return found + (lines(device, *others) if self.has("written") else [])

    def steps(self, device: str) -> list[Steps]:
        """Those of models, in order."""
        if self.sweep != "shape":
            return model_steps(self.sweep, device)
        if self.model == "none":
            return []
        ways = (*BLOCKS, "model") if device == "cuda" else BLOCKS
        plain = dataclasses.replace(Configuration.named(self, device, CONTEXT), batch=STEP_BATCH)
        return [Steps(plain, ways)]


SHOWN = ("ms", "ms_cold", "ms_warm", "kernels_written", "kernels_called", "library_calls")
SAYS = "the median call, the first with nothing compiled yet and from the cache, what Inductor made"


def attention_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each shape, eager and compiled in turns."""
    return [
        Task(str(shape), {"shape": dataclasses.asdict(shape)}, shape.keys(), in_turns=True)
        for shape in given.shapes(device)
    ]


def model_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each model, its ways of compiling in turns."""
    made = []
    for steps in given.steps(device):
        compiled = {way: steps.compiled(way) for way in steps.ways}
        rows = {w: tuple(one.keys(COMPILE_MODEL, phase=one.phases)) for w, one in compiled.items()}
        made.append(Task(str(steps.plain), dataclasses.asdict(steps), rows, in_turns=True))
    return made


ATTENTION = Table(
    COMPILE_ATTENTION,
    attention_tasks,
    says=f"Attention, eager and compiled: {SAYS}",
    shown=SHOWN,
    plot=Plot(x="seq_len", panels=("pass",)),
)
WHOLE_STEPS = Table(
    COMPILE_MODEL,
    model_tasks,
    says=f"The step of a model: {SAYS}",
    shown=SHOWN,
    silence_s=3600,  # of a large model compiled as one graph, minutes pass before anything is said
)
EXPERIMENT = Experiment(Parameters, (ATTENTION, WHOLE_STEPS), "torch.compile", refuse)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_attention, draw = ATTENTION.measure_and_show, ATTENTION.draw
measure_models = WHOLE_STEPS.measure_and_show
