"""What a step holds at its fullest: the closed forms against every tensor that PyTorch makes."""

import itertools

import committed
import pytest
import torch
from cuda_casts import as_cuda_casts
from taped import CudaTape

from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import SIZES, Shape
from a2lib.theory.memory.checkpointing import strategy_peak
from a2lib.theory.memory.step import StepMemory, asked, peak

pytestmark = pytest.mark.usefixtures("plain_frames")  # it counts a step's tensors

# Where the highest is the logits' gradient, a block's FFN, the softmax's gradient, or the end.
CASES = {
    "many words": (Shape(32, 64, 2, 2, 4000), 2, 32, "fp32", "eager"),
    "a wide FFN": (Shape(64, 1024, 3, 2, 40), 4, 64, "bf16", "flash"),
    "long rows": (Shape(64, 128, 3, 4, 40), 2, 192, "bf16", "eager"),
    "few tokens": (Shape(256, 512, 3, 2, 40), 1, 16, "fp32", "flash"),
}


class AsOurFlash(torch.autograd.Function):
    """Make and keep what our tiled attention does, its result token by token; nothing is
    computed."""

    @staticmethod
    def forward(ctx, q, k, v):
        batch, heads, tokens, size = q.shape
        o = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
        ctx.save_for_backward(q, k, v, o, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def taped(step):
    """Return the tape of a second step on the CPU, with what CUDA makes."""
    model = TransformerLM.from_size(step.shape, step.context, seed=0)
    for layer in model.layers:
        layer.attn.attention = as_cuda_casts if step.attention == "eager" else AsOurFlash.apply
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(step.batch, step.context, dtype=torch.long)
    targets = torch.zeros(step.batch, step.context, dtype=torch.long)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bf16"):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=step.fresh)

    run()
    with CudaTape() as tape:
        tape.hold([*model.parameters(), *model.buffers(), tokens, targets])
        tape.hold(p.grad for p in model.parameters() if p.grad is not None)
        for state in optimizer.state.values():
            tape.hold(state.values())
        run()
    return tape


@pytest.mark.parametrize("case", CASES)
def test_the_fullest_moment_is_that_of_every_tensor(case):
    for fresh in (True, False):
        step = StepMemory(*CASES[case], fresh)
        tape = taped(step)
        assert peak(step).total == pytest.approx(tape.peak, rel=0.035), fresh


def test_every_peak_that_was_measured_is_the_count():
    steps = {"phase": "step", "status": "ok", "mode": "train-step", "step_number": "1"}
    checked = 0
    for row in committed.measured("memory"):
        if not steps.items() <= row.items() or row["model"] not in SIZES:
            continue
        checked += 1
        sizes = SIZES[row["model"]], int(row["batch"]), int(row["context"])
        step = StepMemory(*sizes, row["precision"], row["attention"])
        assert int(row["tensor_bytes"]) == asked(step), row
    assert checked > 30


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_without_a_strategy_the_peak_is_the_steps(attention, fresh):
    """One block's moments stand for all, played through block by block."""
    sizes = ("small", 256), ("2.7B", 512), ("2.7B", 2048), ("large", 128)
    for (size, context), precision in itertools.product(sizes, ("fp32", "bf16")):
        step = StepMemory(SIZES[size], 4, context, precision, attention, fresh)
        beyond = peak(step).total - sum(step.standing().values())
        assert strategy_peak(step, "none") == pytest.approx(beyond, rel=1e-3), step
