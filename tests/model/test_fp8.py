"""FP8 products of the FFN: as far from exact ones as e4m3's roundings are, and no further."""

import math

import pytest
import torch
import torch.nn.functional as F
from refusals import refused

from a2lib.activations import PRODUCTS, BlockPlan
from a2lib.model import SwiGLU, TransformerLM
from a2lib.model.checkpointing import KEPT
from a2lib.model.fp8 import E4M3, Fp8SwiGLU, fp8_product, fp8_rows, fp8_swiglu, use_fp8
from a2lib.model.offload import Mover, PlannedBlocks

TOKENS, D, F_ = 128, 64, 96
# Of 3 bits after the point an error is even in half a step of 2**-3, and a number at least 1.
ROUNDING = 2**-3 / math.sqrt(12)
# Roundings behind a result, which add up as independent ones. y: x and a weight for gate and for
# value, the hidden tensor and w2. dx and dw: those of gate and value, two for the hidden tensor's
# gradient (of dw2: none), and two of the last product.
ROUNDINGS = {"y": 6, "dx": 8, "dw1": 8, "dw2": 6, "dw3": 8}


def random(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def inputs(dtype=torch.float32):
    """x, w1, w2 and w3, and the gradient of the result."""
    x, w1 = random(TOKENS, D, 0), random(F_, D, 1) * D**-0.5
    w2, w3 = random(D, F_, 2) * F_**-0.5, random(F_, D, 3) * D**-0.5
    return [x.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)], random(TOKENS, D, 4)


def plain(x, w1, w2, w3):
    return (F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()


def results(function, dtype=torch.float32):
    """y and the gradients, by name."""
    leaves, dy = inputs(dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(*leaves)
    x, w1, w2, w3 = leaves
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad, "dw3": w3.grad}


def off(tensor, right):
    return ((tensor.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_off_by_the_roundings_of_e4m3(dtype):
    exact, rounded = results(plain), results(fp8_swiglu, dtype)
    for name, number in ROUNDINGS.items():
        error = off(rounded[name], exact[name])
        assert ROUNDING < error < math.sqrt(number) * ROUNDING, (name, error)
        assert rounded[name].dtype == dtype


def test_a_product_is_that_of_the_rounded_rows_and_each_row_has_a_scale():
    a, b = random(32, 64, 1), random(48, 64, 2)
    a *= torch.logspace(-6, 6, 32)[:, None]  # e4m3 alone has 2**-9 to 448
    (a8, a_scale), (b8, b_scale) = fp8_rows(a), fp8_rows(b)
    assert a8.dtype == E4M3 and a_scale.dtype == torch.float32 and a_scale.shape == (32, 1)
    assert a8.float().abs().amax(1).eq(448).all()
    right = (a8.double() * a_scale) @ (b8.double() * b_scale).t()
    product = fp8_product((a8, a_scale), (b8, b_scale), torch.float32)
    for row, of_rounded, exact in zip(product, right, a @ b.t(), strict=True):
        assert off(row, of_rounded) < 1e-6
        assert off(row, exact) < 2 * ROUNDING


def test_a_product_in_float32_is_that_of_the_library():
    a, b = fp8_rows(random(32, 64, 1)), fp8_rows(random(48, 64, 2))
    (a8, a_scale), (b8, b_scale) = a, b
    scales = {"scale_a": a_scale, "scale_b": b_scale.t()}
    right = torch._scaled_mm(a8, b8.t(), **scales, out_dtype=torch.bfloat16)
    assert off(fp8_product(a, b, torch.float32), right) < 2**-8  # a rounding to bf16


def test_rows_of_a_transposed_matrix_are_its_columns():
    a = random(32, 48, 1)
    values, scales = fp8_rows(a.t())
    assert values.is_contiguous() and scales.shape == (48, 1)
    assert off(values.float() * scales, a.t()) < ROUNDING


def test_zeros_stay_and_what_is_not_finite_is_seen():
    x = torch.ones(4, 16)
    x[1], x[2, 3], x[3, 3] = 0, math.nan, math.inf
    values, scales = fp8_rows(x)
    back = values.float() * scales
    assert torch.equal(back[:2], x[:2])
    assert back[2].isnan().all() and back[3].isnan().any()
    for bad in (math.nan, math.inf):
        tensors, _ = inputs()
        tensors[0][5, 7] = bad
        y = fp8_swiglu(*tensors)
        assert y[5].isnan().all() and y[6].isfinite().all()


def test_parameters_stay_what_they_are():
    model = TransformerLM(32, 16, 32, 2, 2, 48, seed=0)
    before = dict(model.named_parameters())
    names = [*model.state_dict()]
    use_fp8(model)
    assert [*model.state_dict()] == names
    for block in model.layers:
        assert isinstance(block.ffn, Fp8SwiGLU)
    model(torch.randint(32, (1, 16))).sum().backward()
    for name, p in model.named_parameters():
        assert p is before[name] and p.grad.norm() > 0, name


def test_compiled_in_one_graph_it_is_the_same():
    torch._dynamo.reset()
    compiled = torch.compile(fp8_swiglu, backend="aot_eager", fullgraph=True, dynamic=False)
    eager, found = results(fp8_swiglu, torch.bfloat16), results(compiled, torch.bfloat16)
    for name, right in eager.items():
        assert torch.equal(found[name], right), name


def test_blocks_by_a_plan_are_the_same():
    """Some results kept, some computed again, some sent to the host."""
    assert torch.ops.aten._scaled_mm.default in KEPT["linear"]
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(3))
    gradients = {}
    for is_planned in (False, True):
        torch._dynamo.reset()
        model = TransformerLM(32, 16, 32, 3, 2, 48, attention="sdpa_flash", seed=0)
        use_fp8(model)
        if is_planned:
            for block in model.layers:
                block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
            mover = Mover("cpu", least=1)
            plans = [BlockPlan(("k_proj", "w3")), BlockPlan(PRODUCTS, 10**4), BlockPlan(())]
            model.use_checkpointing(PlannedBlocks(plans, mover))
        loss = model(tokens, tokens)
        loss.backward()
        for name, p in model.named_parameters():
            gradients.setdefault(name, []).append(p.grad)
    assert mover.moved_bytes > 0
    for name, (planned, right) in gradients.items():
        torch.testing.assert_close(planned, right, msg=name)


def test_what_it_refuses_is_one_line():
    (x, w1, w2, w3), _ = inputs()
    refused(r"\(128, 64\), \(96, 64\), \(96, 64\), .* allowed are", fp8_swiglu, x, w1, w1, w3)
    refused("tokens is 120; .* multiples of 16", fp8_swiglu, x[:120], w1, w2, w3)
    narrow = SwiGLU(24, 32)
    refused("d_model is 24", Fp8SwiGLU(narrow), torch.ones(16, 24))
    words = "x is torch.float16; allowed are torch.bfloat16 or torch.float32"
    refused(words, fp8_swiglu, x.half(), w1, w2, w3)
    refused("w2 is torch.bfloat16; .* the same for all", fp8_swiglu, x, w1, w2.bfloat16(), w3)
