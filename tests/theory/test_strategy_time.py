"""What a strategy computes again: operations as they are counted elsewhere, bytes by hand."""

import pytest
from refusals import refused

from a2lib.theory.attention import attention_flops
from a2lib.theory.memory.tensors import StepMemory
from a2lib.theory.strategy_time import Work, forward_work, milliseconds, repeated_work
from a2lib.theory.transformer import Shape, forward_flops

SHAPE, BATCH, CONTEXT = Shape(d_model=16, d_ff=40, num_layers=8, num_heads=2, vocab_size=64), 2, 32
WHERE = SHAPE, BATCH, CONTEXT
EAGER, FLASH = (StepMemory(*WHERE, attention=name) for name in ("eager", "flash"))
U = 4 * BATCH * CONTEXT * SHAPE.d_model
G = 4 * BATCH * CONTEXT * SHAPE.d_ff


def test_operations_of_a_forward():
    whole = forward_flops(*WHERE, causal=True)
    assert forward_work(FLASH) == Work(whole, forward_work(FLASH).bytes)
    # Eager attention's take the time of their bytes, and are all scores.
    scores = attention_flops(BATCH, 2, CONTEXT, CONTEXT, 8, True, "forward")
    eager = forward_work(EAGER)
    assert (eager.flops, eager.score_flops) == (whole - 8 * scores, 2 * 8 * scores)
    assert eager.operations == forward_flops(*WHERE)


def test_bytes_by_hand():
    """float32, tiled attention: what stands between the products of a block."""
    rows = 4 * BATCH * CONTEXT
    weight, table = 4 * SHAPE.d_model, 4 * CONTEXT * 4
    norm = 7 * U + 2 * rows + 4 * rows + weight
    rope = 4 * (U + table) + 3 * U + 2 * U
    block = 2 * norm + 2 * rope + 5 * G + 3 * U  # and one of two sums
    assert repeated_work("block", FLASH).bytes == 8 * block
    # The products' results kept: all between is repeated all the same.
    for ops in ("linear", "products", "attention"):
        assert repeated_work(f"selective:{ops}", FLASH).bytes == 8 * block
    assert repeated_work("half", FLASH).bytes == 8 * (block - 3 * U)
    assert repeated_work("segments:4", FLASH).bytes == 8 * block + 6 * 3 * U
    assert repeated_work("none", FLASH) == Work()


def test_eager_attention_moves_its_scores():
    s = 4 * BATCH * 2 * CONTEXT**2
    tiled, eager = (repeated_work("block", step).bytes for step in (FLASH, EAGER))
    # Product, scale, a mask that copies first, softmax, product; q k^T, p v and two copies of rows;
    # two lines of indices, and the mask made of them.
    mask = CONTEXT**2
    rest = 2 * U + 2 * U + 2 * U + 2 * U + 2 * 8 * CONTEXT + 2 * 8 * CONTEXT + mask + mask
    assert eager - tiled == 8 * (1 * s + 2 * s + 4 * s + 2 * s + 1 * s + rest)
    kept = repeated_work("selective:products", EAGER).bytes
    assert eager - kept == 8 * (2 * s + 4 * U)


def test_milliseconds_by_value():
    forward = Work(flops=60, bytes=400)
    # 400 bytes at 4 a ms are 100 of 130 ms; 60 operations the other 30.
    assert milliseconds(forward, forward, 130, 4000) == pytest.approx(130)
    assert milliseconds(Work(20, 40), forward, 130, 4000) == pytest.approx(10 + 10)
    refused("must be more than the 100 ms", milliseconds, forward, forward, 100, 4000)


def test_what_is_no_selection_is_one_line():
    line = "allowed as ops are linear, products, attention"
    refused(line, repeated_work, "selective:softmax", EAGER)
