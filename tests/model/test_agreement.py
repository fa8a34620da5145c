"""Logits and gradients against an independent formulation, in float64, tensor by tensor: the same
Transformer in loops, complex numbers and the state dict alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from a2lib.model import RMSNorm, TransformerLM, cross_entropy

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rope(x, theta):
    """x (T, d): each pair as a complex number, multiplied by exp(i * angle)."""
    length, d = x.shape
    turned = []
    for position in range(length):
        for i in range(d // 2):
            angle = torch.tensor(position * theta ** (-2 * i / d), dtype=torch.float64)
            pair = torch.complex(x[position, 2 * i], x[position, 2 * i + 1])
            turned.append(pair * torch.polar(torch.ones_like(angle), angle))
    return torch.view_as_real(torch.stack(turned)).reshape(length, d)


def rms_norm(x, weight, eps=1e-5):
    rows = []
    for row in x:
        rows.append(row / torch.sqrt((row @ row) / len(row) + eps) * weight)
    return torch.stack(rows)


def attend(q, k, v):
    """One head, (T, d): query by query over the keys it may see."""
    rows = []
    for i, query in enumerate(q):
        weights = torch.exp(k[: i + 1] @ query / len(query) ** 0.5)
        rows.append(weights @ v[: i + 1] / weights.sum())
    return torch.stack(rows)


def part_of(weights, prefix):
    """Return the weights whose names begin with ``prefix``, by the rest of their names."""
    part = {}
    for name, tensor in weights.items():
        if name.startswith(prefix):
            part[name.removeprefix(prefix).removesuffix(".weight")] = tensor
    return part


def block_of(w, x, num_heads, theta):
    """Return the residual stream x (T, D) after a block."""
    normed = rms_norm(x, w["ln1"])
    q = (normed @ w["attn.q_proj"].T).chunk(num_heads, -1)
    k = (normed @ w["attn.k_proj"].T).chunk(num_heads, -1)
    v = (normed @ w["attn.v_proj"].T).chunk(num_heads, -1)
    heads = []
    for i in range(num_heads):
        heads.append(attend(rope(q[i], theta), rope(k[i], theta), v[i]))
    x = x + torch.cat(heads, -1) @ w["attn.output_proj"].T
    normed = rms_norm(x, w["ln2"])
    gate = normed @ w["ffn.w1"].T
    gated = gate / (1 + torch.exp(-gate)) * (normed @ w["ffn.w3"].T)
    return x + gated @ w["ffn.w2"].T


def logits_of(weights, token_ids, num_heads, theta=10_000.0):
    """Logits (B, T, V) from ``weights``, a dict of the state dict's names."""
    w = part_of(weights, "")
    logits = []
    for sequence in token_ids:
        x = torch.stack([w["token_embeddings"][token] for token in sequence])
        i = 0
        while f"layers.{i}.ln1.weight" in weights:
            x = block_of(part_of(weights, f"layers.{i}."), x, num_heads, theta)
            i += 1
        logits.append(rms_norm(x, w["ln_final"]) @ w["lm_head"].T)
    return torch.stack(logits)


def loss_of(logits, targets):
    losses = []
    for row, target in zip(logits.flatten(0, -2), targets.flatten(), strict=True):
        losses.append(torch.log(torch.exp(row).sum()) - row[target])
    return sum(losses) / len(losses)


def assert_agrees(model, token_ids, targets, num_heads, theta, **close):
    """The model's logits, loss and gradients are those of the other formulation in float64."""
    logits = model(token_ids)
    loss = cross_entropy(logits, targets)
    loss.backward()
    leaves = {n: w.detach().double().requires_grad_() for n, w in model.state_dict().items()}
    want = logits_of(leaves, token_ids, num_heads, theta)
    want_loss = loss_of(want, targets)
    want_loss.backward()
    torch.testing.assert_close(logits.double(), want, **close)
    torch.testing.assert_close(loss.double(), want_loss, **close)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == leaves.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(
            parameters[name].grad.double(), leaf.grad, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


@st.composite
def cases(draw):
    small = st.integers(1, 3)
    num_heads, head_dim = draw(small), 2 * draw(small)
    sizes = {"vocab_size": draw(st.integers(1, 7)), "context_length": draw(st.integers(1, 6))}
    sizes |= {"d_model": num_heads * head_dim, "num_heads": num_heads}
    sizes |= {"num_layers": draw(st.integers(1, 2)), "d_ff": draw(st.integers(1, 7))}
    sizes["rope_theta"] = draw(st.sampled_from([1.0, 100.0, 10_000.0]))
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, sizes["context_length"]))
    return sizes, batch, length, draw(st.integers(0, 2**31))


@given(cases())
def test_any_small_model(case):
    sizes, batch, length, seed = case
    model = TransformerLM(**sizes, dtype=torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes["vocab_size"], (2, batch, length), generator=generator)
    assert_agrees(model, *tokens, sizes["num_heads"], sizes["rope_theta"], **CLOSE)


@pytest.mark.parametrize("attention", ["eager", "sdpa_math", "sdpa_flash"])
def test_every_attention(make_model, batch, attention):
    model = make_model(attention=attention, dtype=torch.float64)
    assert_agrees(model, *batch, 2, 10_000.0, **CLOSE)


def test_the_triton_kernels_within_float32(make_model, batch):
    model = make_model(attention="flash", num_layers=1)
    assert_agrees(model, *batch, 2, 10_000.0, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_a_norm_in_16_bits_is_the_rounded_norm_in_float64(dtype, size):
    x = (size * torch.randn(4, 64)).to(dtype)
    norm = RMSNorm(64, eps=1e-12)
    want = rms_norm(x.double(), norm.weight.double(), eps=1e-12)
    torch.testing.assert_close(norm(x), want.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_cross_entropy_where_exp_would_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert cross_entropy(logits, torch.tensor([0])) == 0
    assert cross_entropy(logits, torch.tensor([2])) == 2e4
