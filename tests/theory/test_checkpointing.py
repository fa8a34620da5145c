"""Memory and work of checkpointing strategies: by hand, by formula, and on the model itself."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from a2lib.lab.tape import Tape
from a2lib.model import RotaryPositionalEmbedding, TransformerBlock
from a2lib.model.checkpointing import KEPT, strategy
from a2lib.shapes import Shape
from a2lib.theory.attention import attention_flops
from a2lib.theory.memory import checkpointing
from a2lib.theory.memory.checkpointing import (
    BlockBytes,
    halves_peak,
    plan_kept,
    plan_peak,
)
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import block_parameter_count

# On the model: four blocks, of which attention's scores are the largest tensors.
SHAPE, BATCH, CONTEXT = Shape(d_model=16, d_ff=40, num_layers=4, num_heads=2), 2, 32
STEP = StepMemory(SHAPE, BATCH, CONTEXT)


MODEL = "none block segments:2 segments:3 segments:4 nested:2 recursive chain".split()


def blocks(layers):
    rope = RotaryPositionalEmbedding(1e4, SHAPE.head_dim, CONTEXT)
    modules = torch.nn.ModuleList()
    for _ in range(layers):
        modules.append(TransformerBlock(SHAPE.d_model, SHAPE.num_heads, SHAPE.d_ff, rope))
    return modules


def measured(layers, run, fresh):
    """Bytes after forward and the peak of backward, above the weights, on the CPU; ``run`` is what
    calls the blocks.

    The first input counts (checkpoints hold it, and the first block saves it), the loss too: it is
    a product and a sum, whose one result lives all through backward.
    """
    modules = blocks(layers)
    x, weight = torch.randn(2, BATCH, CONTEXT, SHAPE.d_model)
    if not fresh:
        for p in modules.parameters():
            p.grad = torch.zeros_like(p)
    weights = [*modules.parameters(), *modules.buffers()]
    gradients = [p.grad for p in modules.parameters() if p.grad is not None]
    with Tape() as tape:
        tape.hold([*weights, *gradients, x, weight])
        standing = tape.now
        y = (x + 0).requires_grad_()
        y = run(modules, y)
        after = tape.now
        tape.restart()
        loss = (y * weight).sum()
        del y
        loss.backward()
    return after - standing, tape.peak - standing


def unit(run, gradients, fresh):
    """The bytes of one block, or half, from one and two of them; and those of the last output."""
    one, peak = measured(1, run, fresh)
    two, _ = measured(2, run, fresh)
    stream = BATCH * CONTEXT * SHAPE.d_model * 4
    return BlockBytes(stream, two - one, peak, gradients), one - (two - one)


def attentions(blocks, x):
    for block in blocks:
        x = block._attention(x)
    return x


def ffns(blocks, x):
    for block in blocks:
        x = block._ffn(x)
    return x


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_the_model_has_the_bytes_of_the_plan(fresh):
    """Of whole blocks, of halves, and of operations that are kept."""
    n = SHAPE.num_layers
    gradients = 4 * block_parameter_count(SHAPE)
    block, output = unit(strategy("none", 2), gradients, fresh)
    of_ffn = 4 * (3 * SHAPE.d_model * SHAPE.d_ff + SHAPE.d_model)
    attention, _ = unit(attentions, gradients - of_ffn, fresh)
    ffn, _ = unit(ffns, of_ffn, fresh)
    want = {}
    for name in MODEL:
        want[name] = plan_kept(name, n, block), plan_peak(name, n, block, fresh)
    want["half"] = plan_kept("half", n, block), halves_peak(n, attention, ffn, fresh)
    for ops in KEPT:
        peak = checkpointing.selective_peak(ops, replace(STEP, fresh=fresh), block)
        want[f"selective:{ops}"] = n * checkpointing.selective_kept(ops, STEP), peak
    for name, (kept, peak) in want.items():
        found = measured(n, strategy(name, n), fresh)
        assert found == (kept + output, peak), name


def test_recomputed_work_is_that_of_the_model():
    """In forwards of a block, less its last matmul where a checkpoint ends in a block."""
    tokens, n, flops = BATCH * CONTEXT, SHAPE.num_layers, {}
    last = 2 * tokens * SHAPE.d_model * SHAPE.d_ff
    sizes = BATCH, SHAPE.num_heads, CONTEXT, CONTEXT, SHAPE.head_dim
    forward = 2 * tokens * SHAPE.block_matrices + attention_flops(*sizes, False, "forward")
    modules, levels = blocks(n), int(math.log2(n))
    work = {"none": (0, 0), "segments:2": (1, 1 / 2), "nested:2": (1 + 1 / 2, 1)}
    work |= {"recursive": (1 + (levels - 1) / 2, 1), "chain": ((n + 1) / 2, 1)}
    for name, (forwards, cuts) in work.items():
        with FlopCounterMode(display=False) as counter:
            x = torch.randn(BATCH, CONTEXT, SHAPE.d_model, requires_grad=True)
            strategy(name, n)(modules, x).sum().backward()
        flops[name] = counter.get_total_flops()
        again = n * (forwards * forward - cuts * last)
        assert flops[name] - flops["none"] == pytest.approx(again), name
