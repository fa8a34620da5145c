"""The peak of a training step's memory, from the tensors that are alive at its highest moments.

``saved.py`` has what a block keeps for its backward, ``checkpointing.py`` what a strategy keeps of
all blocks. Here is what a backward needs beside it: ``block_moments`` lists, kernel by kernel, all
that is alive while one block goes backward, of which the highest is M of ``checkpointing.py``;
``head_moments`` does so for the last norm, the head and the loss. ``strategy_memory`` puts them
together.

The order is that of autograd on CUDA: a node computes the gradient of its second operand first,
its saved tensors go when it is done, and gradients of weights are handed over before the graph goes
on. The peaks of whole models in data/ are held against it by a test. What it leaves out: cuBLAS's
workspaces, and what PyTorch's allocator gives beyond what is asked of it (up to 1 MiB for each
tensor of more than that).

    u  B T D    g  B T F    s  B H T T    L  B T V    rows  B T    in elements
"""

from __future__ import annotations

from dataclasses import dataclass

from a2lib.theory.checkpointing import ATTENTION, FFN, BlockBytes, cost, plan, selective_kept
from a2lib.theory.products import check_sizes
from a2lib.theory.saved import WIDE, Saved, block_saved
from a2lib.theory.transformer import Shape, block_gradient_bytes

HALVES = (ATTENTION, FFN)


@dataclass(frozen=True)
class Moment:
    """All that is alive of one ``half`` of a block when a ``kernel`` of its backward ends, the
    gradient that came in and the half's own finished gradients among it; ``inside`` of these
    ``bytes`` are a temporary that an operator makes and no graph shows."""

    half: str
    kernel: str
    bytes: int
    inside: int = 0


@dataclass(frozen=True)
class StrategyMemory:
    """Bytes beyond what is there between steps: ``kept`` after forward and loss, ``peak`` of the
    whole step but its optimizer. ``where`` is blocks or head, whichever is higher."""

    kept: int
    peak: int
    where: str


class _Sizes:
    def __init__(self, shape: Shape, batch: int, context: int, attention: str, precision: str):
        check_sizes(batch=batch, context=context)
        self.saved = block_saved(shape, batch, context, attention, precision)
        self.casts = precision == "bf16"
        self.narrow = 2 if self.casts else WIDE
        self.eager = attention == "eager"
        rows, D, F = batch * context, shape.d_model, shape.d_ff
        self.u, self.g = rows * D, rows * F
        self.s = batch * shape.num_heads * context**2
        self.square, self.wide = D * D, D * F
        self.lse = WIDE * rows * shape.num_heads
        self.norm = WIDE * D

    def of(self, half: str) -> list[Saved]:
        parts = ("ln2", "ffn") if half == FFN else ("ln1", "attn")
        return [one for one in self.saved if one.module.startswith(parts)]

    def saved_bytes(self, half: str) -> int:
        return sum(one.bytes for one in self.of(half))

    def gradients(self, half: str) -> int:
        matrices = 3 * self.wide if half == FFN else 4 * self.square
        return WIDE * matrices + self.norm


def block_moments(
    shape: Shape,
    batch: int,
    context: int,
    attention: str = "eager",
    precision: str = "fp32",
    *,
    fresh: bool = True,
) -> list[Moment]:
    """What is alive at the highest moments of one block's backward, in order: of the FFN without
    what the attention half has saved, of attention without gradients of the FFN.

    ``attention`` and ``precision`` as ``block_saved``, errors too; ``fresh`` if this backward makes
    the gradients' memory.
    """
    z = _Sizes(shape, batch, context, attention, precision)
    return _ffn(z, fresh) + _attention(z, fresh)


def _ffn(z: _Sizes, fresh: bool) -> list[Moment]:
    held = z.saved_bytes(FFN)
    dy = WIDE * z.u
    down = 2 * z.u if z.casts else 0  # the gradient that came in, rounded for the products
    hidden, dw = z.narrow * z.g, z.narrow * z.wide
    found = [Moment(FFN, "w2", held + dy + down + dw + hidden)]
    held -= hidden + (dw if z.casts else 0)  # its input, and its 16-bit weight
    if z.casts:
        found.append(Moment(FFN, "widen w2's", held + dy + hidden + dw + WIDE * z.wide))
    done = WIDE * z.wide if fresh else 0
    found.append(Moment(FFN, "gate", held + dy + done + 3 * hidden))
    found.append(_last(FFN, z, hidden, z.wide, 2 if fresh else 0))
    return found


def _last(half: str, z: _Sizes, rows: int, weight: int, done: int) -> Moment:
    """The last of several linear layers with one input, and the norm before them: ``rows`` is the
    gradient that comes in, ``weight`` the matrix, ``done`` finished gradients of its size."""
    u, dw = WIDE * z.u, z.narrow * weight
    dx = z.narrow * z.u
    norm = sum(one.bytes for one in z.of(half) if one.module.startswith("ln"))
    kept = z.narrow * (z.u + (weight if z.casts else 0))  # this layer's own input and weight
    # The gradient that came to the half, and that of the norm, which the layers before have begun.
    held = norm + 2 * u + WIDE * weight * done
    product = held + kept + rows + dx + dw
    widened = held + dw + WIDE * weight if z.casts else 0
    # The gradient of the norm's weight, by element and then summed, beside that of its input.
    fresh = WIDE * weight if done else 0
    return Moment(half, "norm", max(product, widened, held + fresh + 2 * u + z.norm))


def _attention(z: _Sizes, fresh: bool) -> list[Moment]:
    held = z.saved_bytes(ATTENTION)
    dy, rows, dw = WIDE * z.u, z.narrow * z.u, z.narrow * z.square
    down = 2 * z.u if z.casts else 0
    found = [Moment(ATTENTION, "output", held + dy + down + dw + rows)]
    held -= dw if z.casts else 0
    done = WIDE * z.square if fresh else 0
    if not z.eager:
        # dq, dk and dv beside do, and a number for each row.
        found.append(Moment(ATTENTION, "flash", held + dy + done + 4 * rows + z.lse))
        found.append(_last(ATTENTION, z, rows, z.square, 3 if fresh else 0))
        return found
    held -= rows  # the heads' results
    scores, wide = z.narrow * z.s, WIDE * z.s
    # A copy of do with the heads in front, dv and dp.
    found.append(Moment(ATTENTION, "do v^T", held + dy + done + 2 * rows + scores))
    held -= rows  # v
    if z.casts:
        held -= scores  # the 16-bit weights, which the product alone reads
        found.append(Moment(ATTENTION, "widen dp", held + dy + done + rows + scores + wide))
    live = held + dy + done + rows + 3 * wide
    found.append(Moment(ATTENTION, "softmax", live, inside=wide))
    found.append(_last(ATTENTION, z, rows, z.square, 3 if fresh else 0))
    return found


def block_bytes(
    shape: Shape,
    batch: int,
    context: int,
    attention: str = "eager",
    precision: str = "fp32",
    *,
    fresh: bool = True,
) -> tuple[BlockBytes, dict[str, BlockBytes]]:
    """I, A, M and G of a block, and of its halves by name; arguments as ``block_moments``."""
    z = _Sizes(shape, batch, context, attention, precision)
    moments = _ffn(z, fresh) + _attention(z, fresh)
    entry = WIDE * z.u
    halves = {
        half: BlockBytes(
            entry,
            z.saved_bytes(half),
            max(m.bytes for m in moments if m.half == half),
            z.gradients(half),
        )
        for half in HALVES
    }
    saved = sum(half.saved for half in halves.values())
    peak = max(
        halves[ATTENTION].saved + halves[FFN].peak,
        halves[ATTENTION].peak + (halves[FFN].gradients if fresh else 0),
    )
    return BlockBytes(entry, saved, peak, block_gradient_bytes(shape)), halves


def head_moments(shape: Shape, batch: int, context: int, precision: str = "fp32") -> dict[str, int]:
    """Bytes alive of the last norm, the head and the loss: ``kept`` after the loss, the last
    block's output among them, and the ``peak`` of their backward."""
    check_sizes(batch=batch, context=context)
    rows, D = batch * context, shape.d_model
    u, logits = rows * D, rows * shape.vocab_size
    kept = WIDE * (2 * u + rows + logits)  # input, normalised, root; log-softmax
    if precision == "bf16":
        kept += 2 * (u + shape.vocab_size * D)  # the head's input and weight
    else:
        kept += WIDE * u
    return {"kept": kept, "peak": kept + 2 * WIDE * logits}


def strategy_memory(
    shape: Shape,
    batch: int,
    context: int,
    strategy: str = "none",
    *,
    attention: str = "eager",
    precision: str = "fp32",
    fresh: bool = True,
) -> StrategyMemory:
    """What a step takes under a strategy of ``a2lib.model.checkpointing``.

    ``selective:ops`` keeps results beside what a block that is computed again needs, so its peak is
    an upper bound. Errors as ``plan``, ``selective_kept`` and ``block_saved``.
    """
    block, halves = block_bytes(shape, batch, context, attention, precision, fresh=fresh)
    head = head_moments(shape, batch, context, precision)
    name, _, ops = strategy.partition(":") if isinstance(strategy, str) else ("", "", "")
    if name == "selective":
        each = selective_kept(ops, shape, batch, context, attention, precision)
        kept = shape.num_layers * each
        last = kept + block.peak - block.input
        first = each + block.peak + (shape.num_layers - 1) * block.gradients * fresh
        peak = max(last, first)
    else:
        found = cost(plan(strategy, shape.num_layers), block, halves=halves, fresh_gradients=fresh)
        kept, peak = found.kept, found.peak
    of_head = (WIDE * (shape.vocab_size + 1) * shape.d_model) if fresh else 0
    ends = {"blocks": peak + of_head, "head": kept + head["peak"]}
    where = max(ends, key=ends.get)
    return StrategyMemory(kept + head["kept"], ends[where], where)
