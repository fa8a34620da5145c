"""FP8 products on a GPU: those of the CPU, and compiled those of eager PyTorch."""

import pytest
import torch

from a2lib.model.fp8 import fp8_product, fp8_rows, fp8_swiglu

pytestmark = pytest.mark.gpu


def off(tensor, right):
    return ((tensor.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize("fast", [False, True])
def test_a_product_is_the_cpu_s(fast):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 512, generator=generator), torch.randn(384, 512, generator=generator)
    a *= torch.logspace(-3, 3, 256)[:, None]
    (a8, a_scale), (b8, b_scale) = fp8_rows(a.bfloat16()), fp8_rows(b.bfloat16())
    right = fp8_product((a8, a_scale), (b8, b_scale), torch.float32)
    a_there, b_there = (a8.cuda(), a_scale.cuda()), (b8.cuda(), b_scale.cuda())
    product = fp8_product(a_there, b_there, torch.bfloat16, fast)
    # bf16 has 8 bits; a fast sum has some 14.
    assert off(product.cpu(), right) < 2**-8


def test_compiled_it_is_as_eager():
    generator = torch.Generator("cuda").manual_seed(0)
    tokens, d, f = 512, 1024, 2048
    tensors = []
    for rows, columns in ((tokens, d), (f, d), (d, f), (f, d), (tokens, d)):
        tensor = torch.randn(rows, columns, generator=generator, device="cuda")
        tensors.append((tensor * (1 if rows == tokens else columns**-0.5)).bfloat16())
    *leaves, dy = tensors
    compiled = torch.compile(fp8_swiglu, fullgraph=True, dynamic=False)
    eager, found = results(fp8_swiglu, leaves, dy), results(compiled, leaves, dy)
    # Fused, intermediate results are not rounded to bf16; then some round to another FP8 number.
    for name in ("y", "dx", "dw1", "dw2", "dw3"):
        assert off(found[name], eager[name]) < 0.03, name


def results(function, tensors, dy):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    y.backward(dy)
    x, w1, w2, w3 = leaves
    return {"y": y, "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad, "dw3": w3.grad}
