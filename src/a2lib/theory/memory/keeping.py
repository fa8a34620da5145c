"""What each block keeps for its backward, computes again, or sends to the host, by arithmetic.

A block of N tokens keeps in any case its input, attention's result and what its FFN gets (16 bits:
2 N D bytes each), and attention's log-sum-exps. Norms, RoPE and SwiGLU are computed again: bytes
that pass once through memory. What is left to decide are five products: q, k and v of N D elements,
w1's and w3's of N F. (Backward wants neither the output projection's nor w2's.) Each has a price to
be computed again, 2 D operations an element, so that a byte of any costs the same, and only what
fits decides.

Where memory is short, tensors travel to the host during the forward of the same and the next block
and back during the backward of the one before: as many bytes of a block as the link carries in the
time of its forward cost nothing; backward is the longer. What still does not fit is computed again,
the cheapest set of at least so many bytes. It is taken from the first blocks: their backward is the
last, when others have left room for what is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from a2lib.theory.collectives import positive
from a2lib.theory.products import check_sizes, matmul_flops
from a2lib.theory.transformer import Shape

ATTENTION_PRODUCTS, FFN_PRODUCTS = ("q_proj", "k_proj", "v_proj"), ("w1", "w3")
PRODUCTS = ATTENTION_PRODUCTS + FFN_PRODUCTS
# Tokens that go through the head at a time; their logits of a vocabulary of 150,000 are 1.2 GB in
# 16 bits.
CHUNK = 4096
# Blocks at the end that send nothing: backward would want it back at once.
STAY = 2


@dataclass(frozen=True)
class Result:
    """A tensor that a block may keep: its bytes, and the milliseconds to compute it again."""

    name: str
    bytes: int
    ms: float


@dataclass(frozen=True)
class BlockPlan:
    """The results that a block keeps, by name, and how many bytes it sends to the host."""

    kept: tuple[str, ...] = PRODUCTS
    moved: int = 0


def block_always(shape: Shape, tokens: int, element_bytes: int = 2) -> tuple[int, ...]:
    """Bytes of the three tensors that a block keeps in any case; the log-sum-exps are the fourth
    and small. ``tokens`` are those of all sequences."""
    check_sizes(tokens=tokens, element_bytes=element_bytes)
    return (tokens * shape.d_model * element_bytes,) * 3 + (4 * tokens * shape.num_heads,)


def block_results(
    shape: Shape, tokens: int, flops: float, element_bytes: int = 2
) -> tuple[Result, ...]:
    """The five products of a block, at ``flops`` operations a second."""
    positive(flops=flops)
    d = shape.d_model
    widths = dict.fromkeys(PRODUCTS, d) | dict.fromkeys(FFN_PRODUCTS, shape.d_ff)
    return tuple(
        Result(name, tokens * n * element_bytes, 1e3 * matmul_flops(tokens, n, d) / flops)
        for name, n in widths.items()
    )


def working_bytes(shape: Shape, tokens: int, chunk: int, element_bytes: int = 2) -> int:
    """What is alive beside the blocks' kept tensors and the sharded state at the fullest moment,
    an upper estimate: while the loss of a chunk is computed or a block goes backward.

    Of the root embedding and head, gathered, and the head's gradient, in float32 at the loss; two
    chunks of logits; two blocks gathered, one's gradients as made and as sent (float32); four
    tensors of the FFN's width and eight of the stream.
    """
    u, g = tokens * shape.d_model * element_bytes, tokens * shape.d_ff * element_bytes
    table = shape.vocab_size * shape.d_model
    root = 2 * table * element_bytes
    loss = 4 * table + 2 * chunk * shape.vocab_size * element_bytes + 2 * u
    block = 2 * table * element_bytes + 4 * g + 8 * u
    return root + max(loss, block) + shape.block_matrices * (3 * element_bytes + 6)


def choose(
    always: Sequence[int],
    results: Sequence[Result],
    blocks: int,
    room: float,
    *,
    host_room: float = 0,
    link: float = 0,
    block_ms: float = 0,
    stay: int = STAY,
) -> list[BlockPlan]:
    """A plan for each of so many equal blocks that together leave at most ``room`` bytes on the
    device, for the fewest milliseconds of computing again; where blocks send, not always the
    fewest, since what they send depends on what they compute again.

    ``always`` are the bytes of tensors that are never computed again, ``results`` the others.
    A block may send so many bytes as ``link`` bytes a second carry in ``block_ms``, whole tensors,
    all blocks together at most ``host_room``, the last ``stay`` none. Raises ValueError, in one
    line, where nothing fits.
    """
    check_sizes(blocks=blocks)
    senders = max(0, blocks - stay)
    cap = min(link * block_ms / 1e3, host_room / senders) if senders else 0.0
    sizes = {one.name: one.bytes for one in results}

    def sendable(recomputed: frozenset[str]) -> list[int]:
        """What a block may send: nothing, its smallest large tensor, the two smallest, ..."""
        kept = [size for name, size in sizes.items() if name not in recomputed]
        large = sorted(x for x in (*always, *kept) if 2 * x >= max(always))
        return [0, *(total for total in accumulate(large) if total <= cap)]

    def over(again: list[frozenset[str]], levels: int) -> float:
        """Bytes above the room, if each sender sends as much as ``levels`` lets it."""
        held = blocks * (sum(always) + sum(sizes.values()))
        held -= sum(sizes[name] for names in again for name in names)
        sent = sum(sendable(names)[: levels + 1][-1] for names in again[:senders])
        return held - sent - room

    most, needed = len(sendable(frozenset())) - 1, 0.0
    while True:
        # The first blocks compute all of it again: few sorts of block are few graphs to compile.
        times = _cheapest(results, blocks, needed)
        again = [
            frozenset(name for name, often in times.items() if i < often) for i in range(blocks)
        ]
        if (excess := over(again, most)) <= 0:
            break
        if all(len(names) == len(results) for names in again):
            raise ValueError(
                f"{blocks} blocks leave {room + excess:.4g} bytes with all products computed "
                f"again; there is room for {room:.4g}"
            )
        needed += excess
    level = next(n for n in range(most + 1) if over(again, n) <= 0)
    plans, left = [], over(again, 0)
    for i, names in enumerate(again):
        moved = sendable(names)[: level + 1][-1] if i < senders and left > 0 else 0
        left -= moved
        plans.append(BlockPlan(tuple(x.name for x in results if x.name not in names), moved))
    return plans


def _cheapest(results: Sequence[Result], blocks: int, needed: float) -> dict[str, int]:
    """How often each result is computed again: of at least ``needed`` bytes the least
    milliseconds, all of it if that is not enough."""
    kinds: dict[tuple[int, float], list[str]] = {}
    for one in results:
        kinds.setdefault((one.bytes, one.ms), []).append(one.name)

    def price(often: tuple[int, ...]) -> tuple:
        freed = sum(n * size for n, (size, _) in zip(often, kinds, strict=True))
        ms = sum(n * ms for n, (_, ms) in zip(often, kinds, strict=True))
        return freed < needed, ms if freed >= needed else -freed, often

    every = product(*(range(blocks * len(names) + 1) for names in kinds.values()))
    return {
        name: n // len(names) + (i < n % len(names))
        for n, names in zip(min(every, key=price), kinds.values(), strict=True)
        for i, name in enumerate(names)
    }
