"""Count exactly what activation checkpointing saves, for N equal blocks.

Let a block's input take I bytes, what it saves for its backward A (its input included), its
parameters' gradients G, and the most that is in use while one block's backward runs M (A and
temporaries, more than A for eager attention, whose backward makes several tensors as large as the
scores).

*Saved after the forward*: I for each checkpoint, A for each block outside of one.

*Peak of the backward.* While block i (from 0) runs backward, M is in use, and beside it what waits
for the blocks before it. In segments of k blocks these are the inputs of the i // k segments
before, and A of the i mod k blocks before it in its own segment, which is recomputed as a whole. If
the gradients exist before (gradient accumulation), the peak is at the last block, the first that
the backward reaches:

    (N / k - 1) I + (k - 1) A + M                                                       (1)

If the backward allocates the gradients (after ``zero_grad(set_to_none=True)``, the default), each
block that is done leaves G. If k G > I the peak is in the first segment, with the gradients of all
others in use:

    (N - k) G + (k - 1) A + M                                                           (2)

Recursive halves (Chen et al., 2016) have log2(N) inputs in (1). ``chain`` keeps the first input,
and one more while a block is recomputed from the start. The page says what each recomputes.
"""

import math
from dataclasses import dataclass

from a2lib.activations import parsed
from a2lib.theory.memory.step import LOSS, StepMemory, block_peaks, head_saved
from a2lib.theory.products import WIDE
from a2lib.theory.transformer import block_parameter_count


@dataclass(frozen=True)
class BlockBytes:
    """The bytes I, A, M and G of a block, or of half a block, as the module defines them."""

    input: int
    saved: int
    peak: int
    gradients: int


def block_bytes(step: StepMemory) -> tuple[BlockBytes, BlockBytes, BlockBytes]:
    """Return I, A, M and G of a block of a step, of its attention half and of its FFN half."""
    saved, entry, s = step.saved, step.sizes["stream"], step.shape
    of_ffn = WIDE * (3 * s.d_model * s.d_ff + s.d_model)
    whole = WIDE * block_parameter_count(s)
    kept = sum(saved.values())
    attention = sum(n for name, n in saved.items() if name.startswith(("x0", "0a/")))
    # Beside the attention half's moments, its own step has no gradients of the FFN.
    others = {"attention": of_ffn if step.fresh else 0, "ffn": attention}
    most = {"attention": attention, "ffn": kept - attention}
    for half in block_peaks(step):
        most[half.name] = max(most[half.name], half.total - others[half.name])
    peak = max(half.total for half in block_peaks(step))
    return (
        BlockBytes(entry, kept, peak, whole),
        BlockBytes(entry, attention, most["attention"], whole - of_ffn),
        BlockBytes(entry, kept - attention, most["ffn"], of_ffn),
    )


def waiting(strategy: str, layers: int) -> list[tuple[int, int]]:
    """Return for each block, while its backward runs, how many inputs and how many whole blocks
    before it are saved beside it.

    strategy: of ``a2lib.model.checkpointing``, except ``half`` and ``selective``

    Raises ValueError as ``parsed``.
    """
    name, k = parsed(strategy, layers)
    if name == "recursive":
        return [(inputs, 0) for inputs in _halved(layers)]
    rules = {
        "none": lambda i: (0, i),
        "block": lambda i: (i, 0),
        "segments": lambda i: (i // k, i % k),
        "nested": lambda i: (i // k + i % k, 0),
        "chain": lambda i: (min(i, 1), 0),
    }
    return [rules[name](i) for i in range(layers)]


def _halved(n: int) -> list[int]:
    """Return for each of n blocks in recursive halves how many inputs wait."""
    if n == 1:
        return [0]
    return _halved((n + 1) // 2) + [1 + inputs for inputs in _halved(n // 2)]


def plan_peak(strategy: str, layers: int, block: BlockBytes, fresh: bool) -> int:
    """Return the bytes at the peak of the backward of all blocks; errors as ``waiting``."""
    gradients = block.gradients if fresh else 0
    moments = []
    for i, (inputs, blocks) in enumerate(waiting(strategy, layers)):
        moments.append(inputs * block.input + blocks * block.saved + (layers - 1 - i) * gradients)
    return max(moments) + block.peak


def halves_peak(layers: int, attention: BlockBytes, ffn: BlockBytes, fresh: bool) -> int:
    """Return the bytes at the peak of the backward of all blocks with a checkpoint around each
    half."""
    of_ffn = ffn.gradients if fresh else 0
    whole = of_ffn + (attention.gradients if fresh else 0)
    moments = []
    for i in range(layers):
        done = (layers - 1 - i) * whole
        moments.append((2 * i + 1) * ffn.input + done + ffn.peak)
        moments.append(2 * i * attention.input + done + of_ffn + attention.peak)
    return max(moments)


def plan_kept(strategy: str, layers: int, block: BlockBytes) -> int:
    """Return the bytes that all blocks save in the forward; errors as ``parsed``."""
    name, k = parsed(strategy, layers)
    if name == "none":
        return layers * block.saved
    inputs = {"half": 2 * layers, "block": layers, "recursive": min(2, layers), "chain": 1}
    return block.input * (inputs[name] if name in inputs else math.ceil(layers / k))


def strategy_peak(step: StepMemory, strategy: str) -> int:
    """Return the bytes at the peak of forward and backward, beyond those that are there between
    steps, under a strategy of ``a2lib.model.checkpointing``.

    The peak is in the blocks, at the head, or at the end of the backward. Raises ValueError as
    ``parsed``.
    """
    block, attention, ffn = block_bytes(step)
    layers = step.shape.num_layers
    name, ops = parsed(strategy, layers)
    if name == "selective":
        kept = layers * selective_kept(ops, step)
        highest = selective_peak(ops, step, block)
    else:
        kept = plan_kept(strategy, layers, block)
        if name == "half":
            highest = halves_peak(layers, attention, ffn, step.fresh)
        else:
            highest = plan_peak(strategy, layers, block, step.fresh)
    row = WIDE * step.shape.d_model
    table = row * step.shape.vocab_size
    above = LOSS + (table + row if step.fresh else 0)
    head = head_saved(step) + 3 * step.sizes["logits"] + LOSS
    end = table + step.sizes["stream"] + above + (layers * block.gradients if step.fresh else 0)
    return max(highest + above, kept + head, end)


def selective_kept(ops: str, step: StepMemory) -> int:
    """Return the bytes that one block saves under ``selective:ops``.

    These are its input, in float32, and the outputs of ``ops``, whether the backward needs them or
    not (it does not need those of w2 and output).
    """
    s, rows = step.shape, step.batch * step.context
    kept = step.sizes["stream"]
    if ops == "attention":
        if step.attention == "flash":
            kept += rows * (step.width * s.q_width + WIDE * s.num_heads)
        return kept
    width = s.q_width + 2 * s.kv_width + 2 * s.d_ff + 2 * s.d_model  # w2's and output's too
    if ops == "products" and step.attention == "eager":
        width += s.num_heads * step.context + s.q_width
    return kept + step.width * rows * width


def selective_peak(ops: str, step: StepMemory, block: BlockBytes) -> int:
    """Return the bytes at the peak of the backward of all blocks under ``selective:ops``.

    A block's saved outputs are used up as it is recomputed. That of w2 is left, since recomputation
    stops before w2.
    """
    left = step.width * step.batch * step.context * step.shape.d_model
    others = step.shape.num_layers - 1
    waits = max(others * selective_kept(ops, step), others * block.gradients * step.fresh)
    return waits + block.peak + (0 if ops == "attention" else left)
