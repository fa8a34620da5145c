"""The peak of a step's memory: moments of a block by what a CPU allocates, whole models by rows."""

import dataclasses

import pytest
import torch
from cuda_casts import as_cuda_casts

from a2lib.measure import snapshot
from a2lib.model import RotaryPositionalEmbedding, TransformerBlock
from a2lib.theory.memory.checkpointing import ATTENTION, FFN
from a2lib.theory.memory.step import StepMemory, peak
from a2lib.theory.memory.strategies import (
    StrategyMemory,
    block_bytes,
    block_moments,
    strategy_memory,
)
from a2lib.theory.transformer import SIZES, Shape, block_parameter_count, state_bytes

# Of the last the gradients are larger than the activations.
SHAPES = {
    "wide": (Shape(16, 40, 1, 2), 2, 32),
    "batch": (Shape(32, 160, 1, 2), 4, 16),
    "short": (Shape(16, 24, 1, 4), 1, 8),
    "heavy": (Shape(32, 96, 1, 2), 2, 8),
}
SCALARS = 8  # the loss of the measurement and its gradient


def measured(path, shape, batch, context, attention, precision, fresh):
    """The peak of one block's backward on the CPU, above its weights."""
    rope = RotaryPositionalEmbedding(1e4, shape.head_dim, context)
    block = TransformerBlock(shape.d_model, shape.num_heads, shape.d_ff, rope, attention)
    if precision == "bf16" and attention == "eager":
        block.attn.attention = as_cuda_casts
    x, weight = torch.randn(2, batch, context, shape.d_model)
    if not fresh:
        for p in block.parameters():
            p.grad = torch.zeros_like(p)
    casts = {"enabled": precision == "bf16", "cache_enabled": False}
    with snapshot.Recorder(path, "cpu") as recorder:
        y = (x + 0).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, **casts):
            y = block(y)
        with recorder.phase("backward"):
            loss = (y * weight).sum()
            del y
            loss.backward()
    return snapshot.peak(snapshot.read(path), "backward").total


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("attention", "name"),
    # Triton's interpreter makes tensors of its own, which show where little else is alive.
    [*(("eager", name) for name in SHAPES), ("flash", "wide")],
)
def test_the_highest_moment_is_what_a_block_allocates(tmp_path, attention, name, precision, fresh):
    sizes = (*SHAPES[name], attention, precision)
    # The softmax's temporary on CUDA is not made there.
    moments = block_moments(*sizes, fresh=fresh, cuda=False)
    _, halves = block_bytes(*sizes, fresh=fresh)
    beside = {FFN: halves[ATTENTION].saved, ATTENTION: halves[FFN].gradients * fresh}
    want = max(m.bytes + beside[m.half] for m in moments)
    assert measured(tmp_path / "x", *sizes, fresh) == want + SCALARS


def test_every_kernel_is_once_the_highest():
    """A moment that never is the highest of these would not be tested."""
    highest = set()
    for sizes in SHAPES.values():
        for precision in ("fp32", "bf16"):
            for fresh in (False, True):
                found = block_moments(*sizes, "eager", precision, fresh=fresh, cuda=False)
                _, halves = block_bytes(*sizes, "eager", precision, fresh=fresh)
                beside = {FFN: halves[ATTENTION].saved, ATTENTION: halves[FFN].gradients * fresh}
                top = max(found, key=lambda m, beside=beside: m.bytes + beside[m.half])
                highest.add(top.kernel)
    assert highest == {"w2", "widen w2's", "gate", "w1 w3", "norm"}


def test_the_softmax_by_hand():
    """A block of long sequences: weights, dp, its product and ds; seven tensors of its input's
    size, the roots and the mask."""
    shape, batch, context = Shape(16, 24, 1, 4), 2, 64
    u, s = 4 * batch * context * 16, 4 * batch * 4 * context**2
    block, halves = block_bytes(shape, batch, context, fresh=False)
    assert block.peak == halves[ATTENTION].peak == 4 * s + 7 * u + 4 * batch * context + context**2
    fresh, halves = block_bytes(shape, batch, context)
    of_output = 4 * 16 * 16
    assert fresh.peak - block.peak == of_output + halves[FFN].gradients
    assert sum(half.gradients for half in halves.values()) == 4 * block_parameter_count(shape)
    assert fresh.saved == sum(half.saved for half in halves.values())


def test_a_step_of_two_blocks_by_hand():
    shape, batch, context = Shape(16, 24, 2, 4, vocab_size=8), 2, 64
    block, _ = block_bytes(shape, batch, context)
    rows = batch * context
    # Input, normalised, scaled, root, log-softmax; then gradients of head and gain; two numbers.
    head, left = 4 * (3 * 16 + 1 + 8) * rows + SCALARS, 4 * 9 * 16 + SCALARS
    assert strategy_memory(shape, batch, context) == StrategyMemory(
        2 * block.saved + head, block.saved + block.peak + left, "blocks"
    )
    every = strategy_memory(shape, batch, context, "block")
    later = max(block.gradients, block.input)
    assert every.kept == 2 * block.input + head
    assert every.peak == later + block.peak + left
    kept = strategy_memory(shape, batch, context, "block", fresh=False)
    block, _ = block_bytes(shape, batch, context, fresh=False)
    assert kept.peak == block.input + block.peak + SCALARS
    # Logits that are larger than anything else: log-softmax, its gradient, that of the logits.
    rich = dataclasses.replace(shape, vocab_size=10**5)
    found = strategy_memory(rich, batch, context, "block")
    logits = 4 * rows * 10**5
    assert found.where == "head"
    assert found.peak == 2 * block.input + 3 * logits + 3 * 4 * rows * 16 + 4 * rows + SCALARS
    # An embedding that is, for few tokens: every gradient and that of its result.
    few = strategy_memory(rich, 1, 2)
    assert few.where == "embedding"
    assert few.peak == state_bytes(rich).gradients + 4 * 2 * 16 + SCALARS // 2 + 4


# Of the last two the highest is the embedding's gradient, and the product of the head's weight.
WHOLE = [
    (SIZES["small"], 4, 256), (SIZES["2.7B"], 4, 512), (SIZES["2.7B"], 4, 2048),
    (Shape(24, 40, 2, 2, 56), 2, 16),
    (Shape(32, 96, 3, 2, 100), 2, 8), (Shape(16, 160, 2, 2, 8), 4, 16),
    (SIZES["large"], 4, 128), (SIZES["2.7B"], 1, 128),
]  # fmt: skip


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_strategy_it_is_the_step_to_the_byte(precision, attention, fresh):
    """One block's moments stand for all: against every tensor of all blocks."""
    where = set()
    for shape, batch, context in WHOLE:
        step = StepMemory(
            shape, batch, context, "forward-backward", precision, attention, fresh=fresh
        )
        found = strategy_memory(
            shape, batch, context, precision=precision, attention=attention, fresh=fresh
        )
        beyond = -sum(step.standing().values())
        assert found.peak == peak(step).total + beyond, (shape, context)
        live = sum((e.bytes if e.made else -e.bytes) * (e.phase in ("forward", "loss"))
                   for e in step.events())  # fmt: skip
        assert found.kept == live
        where.add(found.where)
    assert where == ({"blocks", "head", "embedding"} if fresh else {"blocks", "head"})


@pytest.mark.parametrize("ops", ["linear", "products", "attention"])
def test_selective_is_no_less_than_every_block(ops):
    shape = Shape(16, 24, 4, 4)
    for fresh in (False, True):
        found = strategy_memory(shape, 2, 16, f"selective:{ops}", fresh=fresh)
        assert found.peak >= strategy_memory(shape, 2, 16, "block", fresh=fresh).peak
        assert found.kept >= strategy_memory(shape, 2, 16, "block", fresh=fresh).kept


def test_what_is_no_strategy_or_size_is_one_line():
    for strategy, complaint in (("all", "allowed are none"), ("selective:all", "allowed are")):
        with pytest.raises(ValueError, match=complaint):
            strategy_memory(SHAPES["wide"][0], 1, 8, strategy)
    with pytest.raises(ValueError, match="precision 'fp8': allowed are fp32, bf16"):
        strategy_memory(SHAPES["wide"][0], 1, 8, precision="fp8")
