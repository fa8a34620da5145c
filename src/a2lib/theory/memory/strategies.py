"""The peak of a training step's memory under each strategy of checkpointing.

``checkpointing.py`` has what a strategy keeps of all blocks, ``tensors.py`` every tensor of a step
without one. From such a step of one block comes what a backward needs beside what is kept:
``block_moments`` are its fullest moments kernel by kernel, the highest of them M of
``checkpointing.py``. ``strategy_memory`` puts blocks, head and embedding together. Without a
strategy that is the peak of ``step.py``, which a test holds to the byte.

What is left out: cuBLAS's workspaces, and what PyTorch's allocator gives beyond what is asked of it
(up to 1 MiB for each tensor of more than that). ``step.replay`` has both.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from a2lib.theory.memory import checkpointing
from a2lib.theory.memory.checkpointing import ATTENTION, FFN, BlockBytes, cost, parsed, plan
from a2lib.theory.memory.tensors import StepMemory

HALVES = (ATTENTION, FFN)
HEAD = "head"
# How the names of a half's tensors begin, in a step of one block.
NAMES = {
    ATTENTION: ("x0", "0a/", "layers.0.attn.", "layers.0.ln1"),
    FFN: ("y0", "0f/", "layers.0.ffn.", "layers.0.ln2"),
}


@dataclass(frozen=True)
class Moment:
    """All that is alive of one ``half`` of a block at the fullest moment of a ``kernel`` of its
    backward, the gradient that came in and the half's own finished gradients among it."""

    half: str
    kernel: str
    bytes: int


@dataclass(frozen=True)
class _Step:
    """A step of one block: what its halves keep, their ``moments``, and what is beside them: kept
    of the ``head``, its ``peak``, what is left of it while blocks go backward, and the last of the
    backward, the gradient of the embedding."""

    saved: dict[str, int]
    gradients: dict[str, int]
    moments: tuple[Moment, ...]
    head: int
    head_peak: int
    left: int
    embedding: int


@lru_cache(maxsize=64)
def _played(step: StepMemory) -> _Step:
    one = step.of_a_block("forward-backward")
    live, kept, moments = Counter(), Counter(), {}
    dy = top = left = 0
    half = ""
    for event in one.events():
        change = event.bytes if event.made else -event.bytes
        owner = _owner(event.name)
        if event.phase == "backward" and not kept:
            kept = live.copy()
        if event.name == "dy":
            dy += change
            continue
        live[owner] += change
        if event.phase != "backward" or not event.made:
            continue
        if owner == HEAD:
            top, last = max(top, live[HEAD]), live[HEAD] + dy
            continue
        if owner != half:
            half, left = owner, live[HEAD]
        where = half, event.kernel
        moments[where] = max(live[half] + dy, moments.get(where, 0))
    gradients = Counter()
    for name, size in one.parameters().items():
        gradients[_owner(name)] += size
    found = tuple(Moment(*where, size) for where, size in moments.items())
    return _Step(kept, gradients, found, kept[HEAD], top, left, last)


def _owner(name: str) -> str:
    return next((half for half in HALVES if name.startswith(NAMES[half])), HEAD)


def block_moments(step: StepMemory) -> tuple[Moment, ...]:
    """What is alive at the fullest moment of each kernel of one block's backward, in order: of the
    FFN without what the attention half has saved, of attention without gradients of the FFN."""
    return _played(step).moments


def block_bytes(step: StepMemory) -> tuple[BlockBytes, dict[str, BlockBytes]]:
    """I, A, M and G of a block of a step, and of its halves by name."""
    one, entry = _played(step), step.sizes["stream"]
    most = {half: max(m.bytes for m in one.moments if m.half == half) for half in HALVES}
    halves = {
        half: BlockBytes(entry, one.saved[half], most[half], one.gradients[half]) for half in HALVES
    }
    saved, gradients = (sum(of[half] for half in HALVES) for of in (one.saved, one.gradients))
    beside = one.gradients[FFN] if step.fresh else 0
    peak = max(one.saved[ATTENTION] + most[FFN], most[ATTENTION] + beside)
    return BlockBytes(entry, saved, peak, gradients), halves


def strategy_memory(step: StepMemory, strategy: str) -> tuple[int, int]:
    """Bytes beyond what is there between steps, kept after forward and loss and at the peak of
    forward and backward, under a strategy of ``a2lib.model.checkpointing``. The peak is that of the
    blocks, of the head or of the embedding, whichever is highest. Errors as ``parsed``."""
    block, halves = block_bytes(step)
    one, layers = _played(step), step.shape.num_layers
    name, ops = parsed(strategy, layers)
    if name == "selective":
        kept = layers * checkpointing.selective_kept(ops, step)
        peak = checkpointing.selective_peak(ops, step, block)
    else:
        found = cost(plan(strategy, layers), block, halves=halves, fresh_gradients=step.fresh)
        kept, peak = found.kept, found.peak
    last = layers * block.gradients * step.fresh + one.embedding
    return kept + one.head, max(peak + one.left, kept + one.head_peak, last)
