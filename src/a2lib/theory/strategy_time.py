"""What a strategy of checkpointing computes again, and how long that takes beside a known forward.

Products take their time by operations; what stands between them (norms, RoPE, casts, gates, sums,
eager attention with its scores) by the bytes that it moves. Operations alone would make a strategy
that repeats everything but products free. A block's kernels are those of a step (``StepMemory``);
tiled attention is taken as operations, since its scores move no bytes.
What the checkpoint itself costs the host is not in it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from a2lib.theory.memory.checkpointing import OPS, BlockBytes, cost, parsed, plan
from a2lib.theory.memory.tensors import StepMemory
from a2lib.theory.roofline import Kernel

# What the last product of either half makes, and the sum behind it. No gradient needs the FFN's.
OUTPUT, LAST = ("out", "y0"), ("down", "x1")


@dataclass(frozen=True)
class Work:
    """Operations of products, bytes of all else, and operations of eager attention's two products,
    which take the time of their bytes and have those in ``bytes``."""

    flops: int = 0
    bytes: int = 0
    score_flops: int = 0

    @property
    def operations(self) -> int:
        """Of every product."""
        return self.flops + self.score_flops

    def __add__(self, other: Self) -> Self:
        return Work(
            self.flops + other.flops, self.bytes + other.bytes, self.score_flops + other.score_flops
        )

    def __rmul__(self, times: int) -> Self:
        return Work(times * self.flops, times * self.bytes, times * self.score_flops)


def forward_work(step: StepMemory) -> Work:
    """Of the whole forward of a step, the head's product among it."""
    return sum((_of(kernel) for kernel in replace(step, mode="forward").kernels()), Work())


def repeated_work(strategy: str, step: StepMemory) -> Work:
    """Of what the backward of a step repeats under a strategy of ``a2lib.model.checkpointing``, of
    all blocks.

    Eager ``attention`` computes every score, any other (``flash``) the half that its mask leaves.
    ``half`` ends before the last product of either half, any other checkpoint around blocks before
    that of the FFN. Raises ValueError as ``parsed``.
    """
    layers = step.shape.num_layers
    name, ops = parsed(strategy, layers)
    runs = cut = layers
    without = OUTPUT if name == "half" else ()
    if name == "selective":
        without = OPS[ops] if ops != "attention" else ("tiled",)
    elif name != "half":
        found = cost(plan(strategy, layers), BlockBytes(1, 1, 1))
        runs, cut = int(found.runs), int(found.cut)
    less = dict.fromkeys(without, runs) | dict.fromkeys(LAST, cut)
    return sum(((runs - less.get(made, 0)) * work for made, work in _block(step).items()), Work())


def milliseconds(work: Work, forward: Work, ms_forward: float, bytes_per_s: float) -> float:
    """How long ``work`` takes where ``forward`` takes ``ms_forward``: bytes at ``bytes_per_s``, and
    operations at the rate that is left to the forward's. Raises ValueError where none is left."""
    per_byte = 1e3 / bytes_per_s
    left = ms_forward - per_byte * forward.bytes
    if left <= 0:
        raise ValueError(
            f"a forward of {ms_forward} ms moves {forward.bytes} bytes; its time must "
            f"be more than the {per_byte * forward.bytes:.3g} ms of that"
        )
    return per_byte * work.bytes + left * work.flops / forward.flops


@lru_cache(maxsize=64)
def _block(step: StepMemory) -> dict[str, Work]:
    """The work of one block's forward by the kernels' names."""
    two, found = replace(step, mode="forward", shape=replace(step.shape, num_layers=2)), {}
    for kernel in two.kernels():
        if kernel.count == 2:
            one = _of(replace(kernel, count=1))
            found[kernel.name] = found.get(kernel.name, Work()) + one
    return found


def _of(kernel: Kernel) -> Work:
    if kernel.part == "products":
        return Work(kernel.count * kernel.flops, 0)
    moved = kernel.count * (kernel.read + kernel.written)
    return Work(0, moved, kernel.count * kernel.flops)
