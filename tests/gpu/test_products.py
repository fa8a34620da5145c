"""A weight's gradient in a compiled graph under autocast: in float32 from the product on."""

import pytest
import torch

from a2lib.model import SwiGLU
from a2lib.model.layers import Linear

pytestmark = pytest.mark.gpu


def gradients(module, x, dy, dtype):
    module.zero_grad()
    with torch.autocast("cuda", dtype):
        y = module(x)
    y.backward(dy.to(y.dtype))
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [(256,), (2, 100)])
def test_a_gradient_is_not_rounded_to_16_bits(dtype, tokens):
    draw = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    linear = Linear(80, 48, device="cuda")
    x, dy = torch.randn(*tokens, 80, **draw), torch.randn(*tokens, 48, **draw)
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    exact = dy.to(dtype).double().flatten(0, -2).T @ x.to(dtype).double().flatten(0, -2)
    (ours,) = gradients(compiled, x, dy, dtype).values()
    (rounded,) = gradients(linear, x, dy, dtype).values()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < 1e-5 * exact.norm() < (rounded - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_and_shared_weights(dtype):
    draw = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    for change in ("frozen", "shared"):
        ffn = SwiGLU(64, 96, device="cuda")
        if change == "frozen":
            ffn.w1.weight.requires_grad_(False)
        else:
            ffn.w3 = ffn.w1
        x, dy = torch.randn(4, 33, 64, **draw), torch.randn(4, 33, 64, **draw)
        torch._dynamo.reset()
        compiled = torch.compile(ffn, fullgraph=True, dynamic=False)
        found = gradients(compiled, x, dy, dtype)
        for name, gradient in gradients(ffn, x, dy, dtype).items():
            ours = found.pop(f"_orig_mod.{name}")
            if gradient is None:
                assert ours is None, (change, name)
            else:
                error = (ours - gradient).norm() / gradient.norm()
                assert error < 0.02, (change, name)
        assert not found, change
