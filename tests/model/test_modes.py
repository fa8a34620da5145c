"""Under autocast and under torch.compile."""

import pytest
import torch

from a2lib.model import cross_entropy


def outputs_by_module(model, token_ids):
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, out, n=name: seen.__setitem__(n, (a[0], out)))
    model(token_ids)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["eager", "sdpa_flash", "sdpa_math"])
def test_dtypes_under_autocast(make_model, batch, dtype, attention):
    """As the docstrings say: residual stream and norms in float32, every Linear in 16 bits."""
    model = make_model(attention=attention)
    qkv = []
    inner = model.layers[0].attn.attention
    model.layers[0].attn.attention = lambda *x: qkv.extend(x) or inner(*x)
    with torch.autocast("cpu", dtype):
        seen = outputs_by_module(model, batch[0])
    for name, (x, out) in seen.items():
        if "ln" in name or name in ("token_embeddings", "layers.0", "layers.2"):
            assert out.dtype == torch.float32, name
        elif "proj" in name or ".w" in name or name == "lm_head":
            assert out.dtype == dtype, name
        elif "rope" in name:
            assert out.dtype == x.dtype == dtype, name
    assert {x.dtype for x in qkv} == {dtype}
    x, out = seen["layers.1.ln2"]
    assert torch.equal(out, model.layers[1].ln2(x)), "autocast changes a norm"
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(seen["lm_head"][1], batch[1])
    assert loss.dtype == torch.float32
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_in_bfloat16_stays_there_and_is_near(make_model, batch):
    exact = make_model(dtype=torch.float64)
    rounded = make_model(dtype=torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    logits = rounded(batch[0])
    assert logits.dtype == torch.bfloat16
    want = exact(batch[0])
    assert (logits.double() - want).norm() < 0.02 * want.norm()


def compare_compiled(compiled, eager, x):
    """Output and gradients of both at x, by name; compiled shares eager's parameters."""
    found = []
    for function in (compiled, eager):
        eager.zero_grad()
        y = function(x)
        y.square().sum().backward()
        found.append({"output": y} | {n: p.grad.clone() for n, p in eager.named_parameters()})
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-4, atol=1e-5)


def test_a_block_compiles_whole(make_model):
    """With Inductor, which writes C++ on a CPU."""
    torch._dynamo.reset()
    block = make_model().layers[0]
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0))
    compare_compiled(torch.compile(block, fullgraph=True, dynamic=False), block, x)


@pytest.mark.parametrize("attention", ["eager", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("checkpointing", ["none", "segments:2"])
def test_the_model_is_one_graph(make_model, batch, attention, checkpointing):
    torch._dynamo.reset()
    model = make_model(attention=attention, checkpointing=checkpointing)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    compare_compiled(compiled, model, batch[0])
