"""The leaderboard's step: what notebooks/leaderboard.ipynb calls.

What is measured is a ladder of ways to take it, of which each changes one thing of the one before.
``training`` is the step, ``handlers`` what each rank does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.steps import MODELS
from a2lib.measure import LEADERBOARD
from a2lib.theory.transformer import step_flops

OURS, PEER = "fsdp", "fsdp2"
# What is kept of a block: its input; attention's results too; as many products as fit the device;
# and, of those that do not, as many as the link to the host hides.
KEEPS = ("input", "attention", "fitting", "moved")
CHUNKS, FUSED = "chunks", "fused"


@dataclass(frozen=True)
class Way:
    """``wrapper`` shards, ``head`` is by ``CHUNKS`` under checkpoints or ``FUSED``, ``keeps`` one
    of ``KEEPS``; ``attention`` None is that of the parameters."""

    name: str
    wrapper: str
    head: str
    keeps: str
    attention: str | None = None


LADDER = (
    Way("recomputed", PEER, CHUNKS, "input"),
    Way("attention_kept", PEER, CHUNKS, "attention"),
    Way("fused_head", PEER, FUSED, "attention"),
    Way("own_fsdp", OURS, FUSED, "attention"),
    Way("products_kept", OURS, FUSED, "fitting"),
    Way("offloaded", OURS, FUSED, "moved"),
    Way("own_attention", OURS, FUSED, "moved", "flash"),
)
WAYS = tuple(way.name for way in LADDER)
# The board's: on two GPUs. On the CPU every path in seconds.
_DEFAULTS = {
    "cuda": {
        "model": "8B",
        "layers": None,
        "context": 32_768,
        "attention": "sdpa_cudnn",
        "dtype": "bf16",
        "room_percent": None,
    },
    "cpu": {
        "model": "tiny",
        "layers": 4,
        "context": 32,
        "attention": "sdpa_flash",
        "dtype": "fp32",
        "room_percent": 75,
    },
}


@dataclass(frozen=True)
class Step:
    """The training step of a way, as its task and its row have it. ``batch`` is that of a rank."""

    way: Way
    ranks: Ranks
    model: str
    layers: int
    batch: int
    context: int
    attention: str
    dtype: str

    def key(self) -> dict[str, object]:
        known = {**vars(self), **vars(self.ranks), "way": self.way.name}
        return {column: known[column] for column in LEADERBOARD.key}


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/leaderboard.ipynb, in the order of its cell."""

    ways: str = parameter(
        "all", "all, or names from above, commas between", choices=("all",), many=WAYS
    )
    model: str = step_parameters.model(MODELS, "8B", "GPUs")
    layers: int | None = count(None, "blocks; None: the model's own, 4 on the CPU", 1024)
    batch: int = count(1, "sequences a rank", 2**16)
    context: int | None = step_parameters.context(32_768, 32, "tokens of a sequence", "GPUs")
    attention: str = parameter(
        "auto",
        "by whom; auto: sdpa_cudnn on GPUs, sdpa_flash on the CPU",
        choices=("auto", *step_parameters.ATTENTIONS),
    )
    room_percent: int | None = count(
        None, "what may stay of what blocks could keep; None: what there is room for", 100
    )
    warmup_ms: int = count(10_000, "of steps before the timed ones, on GPUs", 10**6)
    rep_ms: int = count(30_000, "of timed steps, on GPUs", 10**6)
    cold: bool = parameter(
        True, "begin each way with nothing in the compilers' caches, and time that"
    )
    world_size: int = parameters.world_size()
    backend: str = parameters.backend()
    remeasure: bool = parameters.remeasure("measure again what is stored already")
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batches")

    def asked(self) -> list[Step]:
        """The steps, in the order of the ladder; on the CPU without our attention, which runs on a
        GPU alone. Raises ParameterError for what these ranks cannot do."""
        ranks = parameters.ranks(self)
        usual = _DEFAULTS[ranks.device]
        wanted = WAYS if self.ways == "all" else names(self.ways)
        model = usual["model"] if self.model == "auto" else self.model
        attention = usual["attention"] if self.attention == "auto" else self.attention
        if ranks.device == "cpu" and wanted != WAYS and "own_attention" in wanted:
            raise ParameterError("ways = 'own_attention': allowed on GPUs, where it runs")
        return [
            Step(
                way,
                ranks,
                model,
                self.layers or usual["layers"] or MODELS[model].num_layers,
                self.batch,
                self.context or usual["context"],
                way.attention or attention,
                usual["dtype"],
            )
            for way in LADDER
            if way.name in wanted and (ranks.device == "cuda" or way.attention != "flash")
        ]

    def spec(self, step: Step) -> dict[str, object]:
        """What the ranks are told of ``step``."""
        usual = _DEFAULTS[step.ranks.device]
        room = usual["room_percent"] if self.room_percent is None else self.room_percent
        return {
            **step.key(),
            **dataclasses.asdict(step.way),
            "attention": step.attention,
            "room_percent": room,
            "warmup_ms": self.warmup_ms,
            "rep_ms": self.rep_ms,
            "cold": self.cold,
        }


def tasks(given: Parameters) -> list[Task]:
    """A task for each way: one that runs out of memory ends its processes alone."""
    return [
        Task(step.way.name, given.spec(step), {step.way.name: (step.key(),)}, ranks=step.ranks)
        for step in given.asked()
    ]


def tflops(row: Mapping[str, str]) -> float:
    """10**12 operations a second of a GPU that the step needs: the model's, by forward and
    backward, causal attention half, and nothing that is computed again."""
    shape = dataclasses.replace(MODELS[row["model"]], num_layers=int(row["layers"]))
    flops = step_flops(shape, int(row["batch"]), int(row["context"]), causal=True)
    return flops / float(row["ms"]) / 1e9


TIMES = Table(
    LEADERBOARD,
    lambda given, device: tasks(given),
    says="The median step; a rate counts what a step needs, not what is computed again",
    shown=("ms", "ms_mean", "n", "ms_forward", "ms_backward", "ms_optimizer", "allocated_bytes")
    + ("kept_bytes", "host_bytes", "products_again", "ms_ready", "loss", "gradient_norm"),
    derived={"TFLOP/s": tflops},
    plot=Plot(),
    silence_s=600,  # making and sharding a model, compiling its blocks, or all timed steps
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "the leaderboard's step")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
