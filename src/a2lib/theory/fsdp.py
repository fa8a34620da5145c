"""Bytes that a rank of fully sharded data parallelism holds in a step.

There are W ranks. A rank keeps 1 / W of every matrix in ``WIDE`` bytes per element, as much of its
gradient and twice as much of AdamW's moments. That is 4 / W bytes per parameter after init, 8 / W
before the first step (no moments yet), and 16 / W from then on. Vectors are replicated.

A step holds more. A unit (a block, or the root: embedding and head) is gathered, in ``computes``
bytes per element, from its all-gather to its end. The next one is prefetched, so two blocks are
there at once, and the root and the last block stay for the backward. The backward makes a block's
whole gradient in ``computes`` bytes, and casts it to ``WIDE`` for the reduce-scatter. One such cast
is held at a time, since the one before has to end first. The block's weights are freed before its
cast is made.

    forward, block i      root + block i + block i + 1
    backward, block i     root + block i + block i - 1, the gradients of head and block i, one cast

Activations are not derived here. The caller gives the bytes that the forward saves; each block has
an equal part of them. Row counts are taken to be multiples of W; else shards are padded.
Rajbhandari et al., arXiv 1910.02054 (stage 3); Zhao et al., arXiv 2304.11277.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.shapes import Shape
from a2lib.theory.collectives import positive
from a2lib.theory.products import WIDE
from a2lib.theory.transformer import parameter_count


def matrices(shape: Shape) -> int:
    """Return the parameters of embedding, head and all blocks' matrices, which are sharded."""
    return 2 * shape.vocab_size * shape.d_model + shape.num_layers * shape.block_matrices


@dataclass(frozen=True)
class Held:
    """Bytes of one rank at one moment, by component.

    gathered: parameters that are not sharded
    travelling: gradients that are not sharded yet, as they are made and as they are sent
    """

    moment: str
    parameters: float
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    travelling: float = 0
    activations: float = 0

    @property
    def parts(self) -> dict[str, float]:
        return {part: size for part, size in vars(self).items() if part != "moment"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def kept(shape: Shape, world_size: int) -> float:
    """Return the bytes of a rank's own parameters: its rows of the matrices, and all vectors."""
    positive(world_size=world_size)
    sharded = matrices(shape)
    return WIDE * (sharded / world_size + parameter_count(shape) - sharded)


def between(shape: Shape, world_size: int) -> list[Held]:
    """Return the bytes after init, before the first optimizer step, and after it with gradients
    still there."""
    parameters = kept(shape, world_size)
    return [
        Held("init", parameters),
        Held("before", parameters, gradients=parameters),
        Held("after", parameters, gradients=parameters, optimizer=2 * parameters),
    ]


def step(
    shape: Shape, world_size: int, activations: float, computes: int = 2, moments: bool = True
) -> Iterator[Held]:
    """Yield the moments of forward and backward that may be the peak, in order.

    activations: bytes that the forward saves for the backward
    computes: bytes per element of matmuls
    moments: whether AdamW's moments are there, as they are after the first step

    "forward" and "backward" of a unit are when it begins, with its parameters gathered. "made" is
    when the backward has its whole gradient, "sent" when that has been cast and is not freed yet.
    The root's are the last but one.
    """
    positive(world_size=world_size, computes=computes)
    parameters = kept(shape, world_size)
    optimizer = 2 * parameters if moments else 0

    def held(
        moment: str,
        gathered: float,
        gradients: float = 0,
        travelling: float = 0,
        activations: float = 0,
    ) -> Held:
        return Held(moment, parameters, gradients, optimizer, gathered, travelling, activations)

    table, matrix = shape.vocab_size * shape.d_model, shape.block_matrices
    root, block, last = computes * 2 * table, computes * matrix, shape.num_layers - 1
    share = activations / shape.num_layers
    yield held("forward root", root + block)
    for i in range(shape.num_layers):
        ahead = block if i < last else 0
        yield held(f"forward {i}", root + block + ahead, activations=i * share)
    yield held("backward root", root + block, activations=activations)
    cast, head = WIDE * matrix, computes * table
    # A block's gradient as it is made, beside its cast; without a cast it is what is sent.
    uncast = block if computes != WIDE else 0
    reduced = WIDE * (matrix / world_size + shape.block_vectors)
    gradients = WIDE * shape.d_model
    waiting = 0  # the cast of the block before, which is held until the next one is made
    for i in reversed(range(shape.num_layers)):
        gathered = root + block + (block if i else 0)
        travelling = head + waiting
        yield held(f"backward {i}", gathered, gradients, travelling, (i + 1) * share)
        yield held(f"made {i}", gathered, gradients, travelling + block, i * share)
        if i:
            gradients += reduced
            yield held(f"sent {i}", gathered - block, gradients, head + cast + uncast, i * share)
            waiting = cast
    # The end: the root's gradients, those of embedding and head, leave before the first block's.
    gradients += WIDE * 2 * table / world_size
    travelling = block + WIDE * 2 * table + (root if uncast else 0)
    yield held("sent root", block, gradients, travelling)
    yield held("sent 0", 0, gradients + reduced, cast + uncast)


def peak(shape: Shape, world_size: int, activations: float) -> Held:
    """Return the moment of the peak of a step after the first one."""
    return max(step(shape, world_size, activations), key=lambda held: held.total)
