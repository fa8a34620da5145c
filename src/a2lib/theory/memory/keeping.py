"""Choose the tensors that each block saves, recomputes, or offloads to CPU memory.

A block of N tokens always saves its input, attention's output and the FFN's input (in 16 bits,
2 N D bytes each), and attention's log-sum-exps. Norms, RoPE and SwiGLU are always recomputed, which
costs one access to memory. The decision is about five matmul outputs: q, k and v of N D elements,
those of w1 and w3 of N F. (The backward needs neither that of the output projection nor that of
w2.) Recomputing one costs 2 D FLOPs per element, so a byte of each costs the same, and only what
fits in memory decides.

Where memory is short, tensors travel to CPU memory during the forward of the same and the next
block, and back during the backward of the block before. As many bytes as the link carries in the
time of a block's forward cost nothing, since the backward takes longer. What still does not fit is
recomputed, by the first blocks: their backward is the last, when the others have freed the memory
that recomputation needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from a2lib.activations import FFN_PRODUCTS, PRODUCTS, BlockPlan
from a2lib.checks import check_sizes
from a2lib.shapes import Shape
from a2lib.theory.collectives import positive
from a2lib.theory.products import matmul_flops

# Last blocks that offload nothing: the backward would need it back at once.
STAY = 2


@dataclass(frozen=True)
class Result:
    """A tensor that a block may save: its bytes, and the milliseconds to recompute it."""

    name: str
    bytes: int
    ms: float


def block_always(shape: Shape, tokens: int, element_bytes: int = 2) -> tuple[int, ...]:
    """Return the bytes of the four tensors that a block always saves: its input, attention's
    output, the FFN's input, and the log-sum-exps. ``tokens`` are those of all sequences."""
    check_sizes(tokens=tokens, element_bytes=element_bytes)
    stream, log_sums = tokens * shape.d_model * element_bytes, 4 * tokens * shape.num_heads
    return stream, stream, stream, log_sums


def block_results(
    shape: Shape, tokens: int, flops: float, element_bytes: int = 2
) -> tuple[Result, ...]:
    """Return the five matmul outputs of a block, recomputed at ``flops`` FLOPs per second."""
    positive(flops=flops)
    results = []
    for name in PRODUCTS:
        width = shape.d_ff if name in FFN_PRODUCTS else shape.d_model
        ms = 1e3 * matmul_flops(tokens, width, shape.d_model) / flops
        results.append(Result(name, tokens * width * element_bytes, ms))
    return tuple(results)


def working_bytes(shape: Shape, tokens: int, chunk: int, element_bytes: int = 2) -> int:
    """Return an upper estimate of the bytes at the peak beside saved tensors and sharded state.

    The peak is at the loss of a chunk, or in the backward of a block. There are embedding and head,
    gathered, and the head's gradient, at the loss in float32; two chunks of logits; two gathered
    blocks, with the gradients of one as made and as sent (float32); four tensors of the FFN's width
    and eight of the stream.
    """
    u, g = tokens * shape.d_model * element_bytes, tokens * shape.d_ff * element_bytes
    table = shape.vocab_size * shape.d_model
    root = 2 * table * element_bytes
    loss = 4 * table + 2 * chunk * shape.vocab_size * element_bytes + 2 * u
    block = 2 * table * element_bytes + 4 * g + 8 * u
    return root + max(loss, block) + shape.block_matrices * (3 * element_bytes + 6)


def fp8_bytes(shape: Shape, tokens: int) -> int:
    """Return an upper estimate of the bytes, beside ``working_bytes``, of a block's backward whose
    FFN multiplies in FP8: its operands, if all are there at once.

    Each is one byte an element. Of the FFN's width are its hidden tensor, for w2's gradient, and
    the gradients of gate and value, each twice: along rows for x's gradient, along columns for the
    weights'. Of the stream's are y's gradient, twice likewise, and x. And there are the weights.
    """
    check_sizes(tokens=tokens)
    return 5 * tokens * shape.d_ff + 3 * tokens * shape.d_model + 3 * shape.d_model * shape.d_ff


def choose(
    always: Sequence[int],
    results: Sequence[Result],
    blocks: int,
    room: float,
    *,
    host_room: float = 0,
    link: float = 0,
    block_ms: float = 0,
) -> list[BlockPlan]:
    """Return a plan for each of so many equal blocks, which together keep at most ``room`` bytes on
    the device. It offloads what it may; beyond that the first blocks recompute, tensor by tensor.

    - ``always``: bytes of the tensors that are never recomputed
    - ``results``: the tensors that may be
    - ``link``, ``block_ms``: a block may offload the bytes that ``link`` bytes per second carry in
      ``block_ms``, in whole tensors
    - ``host_room``: bytes that all blocks together may offload

    Raises ValueError where nothing fits.
    """
    check_sizes(blocks=blocks)
    senders = max(0, blocks - STAY)
    cap = min(link * block_ms / 1e3, host_room / senders) if senders else 0.0

    def saved(recomputed: set[str]) -> list[int]:
        """Return the bytes of each tensor that a block saves."""
        sizes = list(always)
        for result in results:
            if result.name not in recomputed:
                sizes.append(result.bytes)
        return sizes

    def offloaded(recomputed: set[str], most: int) -> int:
        """Return what a block offloads if it may offload ``most`` tensors: its smallest large ones,
        as many as the link carries."""
        total = 0
        for size in sorted(saved(recomputed)):
            is_large = 2 * size >= max(always)
            if is_large and most and total + size <= cap:
                total += size
                most -= 1
        return total

    def excess(plans: list[set[str]], most: int) -> float:
        """Return the bytes above the room if each sender offloads up to ``most`` tensors."""
        total = 0
        for i, recomputed in enumerate(plans):
            total += sum(saved(recomputed))
            if i < senders:
                total -= offloaded(recomputed, most)
        return total - room

    every = len(always) + len(results)
    recomputed = [set() for _ in range(blocks)]
    for names, result in product(recomputed, results):
        if excess(recomputed, every) <= 0:
            break
        names.add(result.name)
    too_much = excess(recomputed, every)
    if too_much > 0:
        raise ValueError(
            f"{blocks} blocks leave {room + too_much:.4g} bytes with all products computed again; "
            f"there is room for {room:.4g}"
        )
    most = 0
    while excess(recomputed, most) > 0:
        most += 1
    plans, left = [], excess(recomputed, 0)
    for i, names in enumerate(recomputed):
        moved = offloaded(names, most) if i < senders and left > 0 else 0
        left -= moved
        kept = [result.name for result in results if result.name not in names]
        plans.append(BlockPlan(tuple(kept), moved))
    return plans
