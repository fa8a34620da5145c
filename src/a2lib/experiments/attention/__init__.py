"""The attention experiment: its parameters, what the sweeps measure, and what the cells of
notebooks/attention.ipynb call. ``handlers`` is how a worker measures it.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.experiments.harness import Experiment, Key, Plot, Table, Task, parameters
from a2lib.experiments.harness.parameters import WithSweep, names, parameter
from a2lib.experiments.passes import Shape
from a2lib.lab import ATTENTION, ATTENTION_LIMIT, ATTENTION_SAVED
from a2lib.theory.eager import by_hand_saved

BATCH, CALLS = 8, {"cuda": 100, "cpu": 5}
DTYPE = "fp32"
HEAD_DIMS = {"cuda": (16, 32, 64, 128), "cpu": (16, 32)}
LENGTHS = {"cuda": (256, 1024, 4096, 8192, 16384), "cpu": (32, 64)}
# Beyond the handout's, until one H200 has too little memory; fewer calls.
BEYOND, BEYOND_CALLS = (24576, 32768, 40960, 49152), 10
# `by_hand` writes the softmax out; `tiled` is FlashAttention-2 in plain PyTorch, for a CPU.
IMPLEMENTATIONS = ("eager", "by_hand", "a2lib", "tiled")
PLAIN = ("eager", "by_hand")
PASSES = ("forward", "backward")
SWEEPS = ("grid", "beyond", "removed", "limit", "all")
# How PyTorch's allocator takes memory: in blocks of its own, or in a range that grows by pages.
ALLOCATORS = ("blocks", "expandable")
# Tokens between two lengths that are tried in looking for the one that fails.
STEP = 256


def saved_tensors(implementation: str, shape: Shape) -> tuple[str, ...]:
    """The names of what waits for a backward, and "other" for what has none."""
    if implementation not in PLAIN:
        return ("q", "k", "v", "o", "lse", "other")
    kept = shape.eager.saved() if implementation == "eager" else by_hand_saved(shape.eager)
    return (*kept, "other")


@dataclass(frozen=True)
class Parameters(WithSweep):
    seq_len: int | None = parameters.count(
        None, "tokens per sequence; None: 16384 on a GPU, 64 on the CPU", 2**24
    )
    head_dim: int = parameters.count(64, "size of a vector", 2**14)
    batch: int = parameters.count(BATCH, "sequences", 2**20)
    causal: bool = parameter(False, "whether a query sees no later key")
    implementations: str = parameter(
        "eager", f"comma list of {', '.join(IMPLEMENTATIONS)}", many=IMPLEMENTATIONS
    )
    calls: int = parameters.count(100, "timed calls of each pass, after some of warm-up", 10**6)
    sweep: str = parameters.sweep(SWEEPS)

    def configurations(self, device: str) -> list[tuple[str, Shape, int]]:
        """(implementation, shape, calls) of the ``attention`` table on ``device``, in order."""
        if self.sweep == "shape":
            seq_len = self.seq_len or {"cuda": 16384, "cpu": 64}[device]
            shape = Shape(DTYPE, self.batch, 1, seq_len, self.head_dim, self.causal)
            return [(name, shape, self.calls) for name in names(self.implementations)]
        wanted = {"grid": grid, "removed": removed, "beyond": beyond}
        return [c for name, of in wanted.items() if self.has(name) for c in of(device)]


def _shapes(lengths, sizes, masks=(False, True)) -> list[Shape]:
    found = itertools.product(lengths, masks, sizes)
    return [
        Shape(DTYPE, BATCH, 1, seq_len, head_dim, causal) for seq_len, causal, head_dim in found
    ]


def grid(device: str) -> list[tuple[str, Shape, int]]:
    """The handout's grid, with and without a causal mask."""
    shapes = _shapes(LENGTHS[device], HEAD_DIMS[device])
    return [("eager", shape, CALLS[device]) for shape in shapes]


def removed(device: str) -> list[tuple[str, Shape, int]]:
    """Causal attention that keeps no matrix, and the softmax written out, which keeps two, at the
    handout's lengths with vectors of 64 (on a CPU of 32). Ours at every size: the flash sweep."""
    ours, middle = ("a2lib", (64,)) if device == "cuda" else ("tiled", (32,))
    lengths, n = LENGTHS[device], CALLS[device]
    tiled = [(ours, s, n) for s in _shapes(lengths, middle, (True,))]
    return tiled + [("by_hand", s, n) for s in _shapes(lengths, middle)]


def beyond(device: str) -> list[tuple[str, Shape, int]]:
    """Longer sequences than the handout's, on a GPU, with vectors of 64: eager until it fails, and
    ours. Where each other size fails is what ``limit`` finds."""
    if device == "cpu":
        return []
    ours = [("a2lib", s, BEYOND_CALLS) for s in _shapes(BEYOND, (64,), (True,))]
    return ours + [("eager", s, BEYOND_CALLS) for s in _shapes(BEYOND, (64,))]


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
    asked = itertools.product(ALLOCATORS, (False, True), HEAD_DIMS[device], PASSES)
    for allocator, causal, head_dim, pass_ in asked if given.has("limit") else ():
        key = {"implementation": "eager", "dtype": DTYPE, "batch": BATCH, "head_dim": head_dim}
        key |= {"causal": causal, "pass": pass_, "allocator": allocator}
        label = f"limit of d = {head_dim}, {pass_}, {allocator}"
        made.append(Task.whole(label + ", causal" * causal, {}, [key]))
    return made


def _task(what: str, name: str, shape: Shape, more: Iterable[Key], **how: object) -> Task:
    spec = {"implementation": name, "shape": dataclasses.asdict(shape), **how}
    key = {"implementation": name, **spec["shape"]}
    del key["heads"]
    return Task.whole(f"{what}{name} {shape}", spec, ({**key, **one} for one in more))


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
EXPERIMENT = Experiment(Parameters, (PASSES_TIMED, SAVED, LIMIT), "Attention in plain PyTorch")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_passes, show_passes, draw = PASSES_TIMED.measure, PASSES_TIMED.show, PASSES_TIMED.draw
measure_saved, measure_limit = SAVED.measure_and_show, LIMIT.measure_and_show
