"""AdamW with masters on a GPU: its roundings, captured and overlapped steps, many elements."""

import copy

import pytest
import torch
from torch import nn

from a2lib.lab.steps import StepConfig, TrainingStep, captured, graph_stream
from a2lib.optim import MasterAdamW, updates
from a2lib.shapes import Shape

pytestmark = pytest.mark.gpu
SHAPES = ((2, 1025), (37, 53), (7,), (), (0, 3), (1024, 1024))


def updated(by_kernel, monkeypatch, dtype):
    """Parameters, masters and states of the same five steps, by the kernel or by operators."""
    monkeypatch.setattr(updates, "_by_kernel", lambda p: by_kernel)
    torch.manual_seed(0)
    params = []
    for shape in SHAPES:
        params.append(nn.Parameter(torch.randn(shape, device="cuda")))
    optimizer = MasterAdamW(params, lr=1e-2, working_dtype=dtype)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [(p, optimizer.masters()[p], optimizer.state[p]) for p in params]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_kernel_is_its_twin(monkeypatch, dtype):
    plain = updated(False, monkeypatch, dtype)
    by_kernel = updated(True, monkeypatch, dtype)
    for (p, master, state), (q, found, other) in zip(plain, by_kernel, strict=True):
        torch.testing.assert_close(found, master, rtol=0, atol=1e-5)
        assert torch.equal(q, found.to(q.dtype)) and p.dtype == q.dtype
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(other[name], state[name], rtol=1e-4, atol=1e-6)
        assert other["step"] == state["step"] == 5


def test_numbers_may_be_whole():
    for lr, decay, wanted in ((0.5, 0.25, 0.375), (1, 0, 0.0)):
        p = nn.Parameter(torch.ones(32, device="cuda"))
        optimizer = MasterAdamW([p], lr=lr, betas=(0, 0), eps=0, weight_decay=decay)
        p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        # roots and quotients are approximate
        torch.testing.assert_close(p, torch.full_like(p, wanted), rtol=0, atol=1e-6)


def test_more_elements_than_32_bits_count():
    n = 2**31 + 40
    if torch.cuda.mem_get_info()[0] < 20 * n:
        pytest.skip("not enough memory")
    p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="cuda"))
    optimizer = MasterAdamW([p], lr=0.5, weight_decay=0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    ends = torch.cat([p[:8], p[2**31 - 8 : 2**31 + 8], p[-8:]]).tolist()
    del optimizer, p
    torch.cuda.empty_cache()  # tests in other processes share the GPU
    assert ends == [0.5] * 32


SMALL = Shape(d_model=768, d_ff=3072, num_layers=3, num_heads=12, vocab_size=10_000)


def losses_of(capture=False, **options):
    """Return the losses of six steps of a small model, from the third on replayed where captured:
    `captured` itself replays the third."""
    options |= {"model": SMALL, "context": 128, "batch": 2, "attention": "flash"}
    config = StepConfig(capture=capture, **options)
    with graph_stream(config):
        step = TrainingStep(config, "cuda")
        losses = [step().item(), step().item()]
        if capture:
            step = captured(step)
            losses.append(step.output.item())
        while len(losses) < 6:
            losses.append(step().item())
        return losses


@pytest.mark.parametrize("mode", ["train-step", "overlapped-step"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_weights"])
def test_its_steps_are_alike_launched_captured_and_overlapped(mode, precision):
    wanted = losses_of(precision=precision, mode="train-step")
    exact = precision == "bf16_weights" or mode == "train-step"
    for capture in (False, True):
        found = losses_of(capture, precision=precision, mode=mode)
        assert found == pytest.approx(wanted, rel=0 if exact else 1e-3, abs=0)
        assert found[-1] < found[0]


def test_compiled_16_bit_weights_learn_as_eager_ones():
    eager = losses_of(precision="bf16_weights")
    assert losses_of(precision="bf16_weights", compile="blocks") == pytest.approx(eager, rel=2e-3)


def test_an_update_beside_a_backward_waits_for_its_gradient():
    """Long products before each gradient: an update that did not wait would take what was there."""
    torch.manual_seed(1)
    model = nn.Sequential()
    for _ in range(6):
        model.append(nn.Linear(2048, 2048, device="cuda"))
    twin, x = copy.deepcopy(model), torch.randn(4096, 2048, device="cuda")
    ours = MasterAdamW(model.parameters(), lr=1e-3)
    plain = MasterAdamW(twin.parameters(), lr=1e-3)
    for _ in range(5):
        with ours.overlapping():
            model(x).square().mean().backward()
        twin(x).square().mean().backward()
        for peer in (ours, plain):
            peer.step()
            peer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), name
