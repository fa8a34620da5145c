"""Under autocast and under torch.compile."""

import pytest
import torch

from a2lib.model import Linear, cross_entropy


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

    def watched(q, k, v):
        qkv.extend([q, k, v])
        return inner(q, k, v)

    model.layers[0].attn.attention = watched
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


def test_the_model_is_one_graph(make_model, batch, loss_and_gradients):
    torch._dynamo.reset()
    model = make_model(checkpointing="segments:2", num_layers=2)
    want_loss, want = loss_and_gradients(model, batch)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    loss, found = loss_and_gradients(compiled, batch)
    torch.testing.assert_close(loss, want_loss, rtol=1e-4, atol=1e-5)
    for name, gradient in want.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-5)


class Products:
    """A backend that counts matrix products of the forward and of the backward."""

    def __init__(self):
        self.counts = []

    def __call__(self, graph, inputs):
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        def count(graph, inputs):
            products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
            self.counts.append(len(products))
            return make_boxed_func(graph.forward)

        # As Inductor has it, whose kernels alone are left out.
        made = aot_autograd(
            fw_compiler=count,
            bw_compiler=count,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        return made(graph, inputs)


@pytest.mark.parametrize("dtype, products", [(torch.float32, 4), (torch.bfloat16, 5)])
def test_products_of_one_input_are_one_where_it_pays(make_model, dtype, products):
    """Autocast copies weights in float32 in any case; of those in 16 bits the narrow q, k and v are
    copied, w1 and w3 are not."""
    torch._dynamo.reset()
    block, counted = make_model().layers[0], Products()
    for module in block.modules():
        if isinstance(module, Linear):
            module.to(dtype)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=counted)
    x, dy = torch.randn(2, 2, 9, 24)
    found = outputs_and_gradients(compiled, block, x, dy)
    # Each product's backward is two.
    assert counted.counts == [products, 2 * products]
    for name, want in outputs_and_gradients(block, block, x, dy).items():
        assert found[name].dtype == want.dtype, name
        error = (found[name] - want).norm() / want.norm()
        assert error < 0.02, name


def outputs_and_gradients(function, block, x, dy):
    """Return by name what a block makes under autocast, ``function`` being it or compiled from
    it."""
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = function(leaf)
    y.backward(dy)
    found = {"output": y.detach(), "input": leaf.grad}
    for name, p in block.named_parameters():
        found[name] = p.grad
    return found


def test_a_hooked_or_replaced_projection_is_called_by_itself(make_model):
    torch._dynamo.reset()
    block, counted = make_model().layers[0], Products()
    block.attn.k_proj.register_forward_hook(lambda module, args, out: 2 * out)

    class Other(type(block.ffn.w1)):
        def forward(self, x):
            return super().forward(x) + 1

    block.ffn.w3.__class__ = Other
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=counted)
    x = torch.randn(2, 9, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, want = compiled(x), block(x)
    assert counted.counts == [7]
    assert (found - want).norm() < 0.02 * want.norm()
