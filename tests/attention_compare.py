"""Run an attention and its gradients, and measure how far they are from float64."""

import contextlib
import functools
import math

import torch
from hypothesis import strategies as st

from a2lib.attention import attention_reference, flash_attention

NAMES = ("o", "dq", "dk", "dv")
# Of the Gluon forward: consumers, and whether programs stay.
HOPPER_FORMS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def with_gradients(attention, q, k, v, do, is_causal):
    """``{o, dq, dk, dv}`` of attention(q, k, v, is_causal) at the output gradient do."""
    leaves = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
    o = attention(*leaves, is_causal)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def in_float64(q, k, v, do, is_causal, scale=None):
    """Return the same of the reference on the same values in float64."""
    reference = functools.partial(attention_reference, scale=scale)
    return with_gradients(reference, q.double(), k.double(), v.double(), do.double(), is_causal)


def log_sum_exp(q, k, is_causal):
    """Return the log-sum-exp of each query's scores in float64; heads of q share those of k."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    hidden = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None]
    return scores.masked_fill(is_causal & hidden, -math.inf).logsumexp(-1)


def errors(results, truth):
    """Relative Frobenius error of each named result; absolute where the truth is nearly zero.

    NaN where the result is NaN and the truth is not, so that no comparison with it passes.
    """
    out = {}
    for name in NAMES:
        got, want = results[name].double(), truth[name]
        if got.shape != want.shape:
            raise AssertionError(f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        # Gradients through a softmax over one key vanish; those of unit size do not.
        norm = want.norm().clamp(min=0.1 * want.numel() ** 0.5)
        out[name] = ((got - want).norm() / norm).item()
    return out


def off_by(got, want):
    """Relative Frobenius error."""
    return ((got.double() - want).norm() / want.norm()).item()


def assert_near(results, truth, allowed, what=""):
    for name, error in errors(results, truth).items():
        assert error <= allowed, f"{name} is off by {error:.2e}, beyond {allowed} {what}"


def scaled(scale):
    """Return the library's attention with this scale, as `with_gradients` calls one."""

    def attention(q, k, v, is_causal):
        return flash_attention(q, k, v, is_causal=is_causal, scale=scale)

    return attention


@contextlib.contextmanager
def poison():
    """Fill memory of the GPU with NaN and free it: the next call's new tensors lie in it."""
    held = []
    for n in (2**14, 2**18, 2**22, 2**24, 2**25):
        held.append(torch.full((n,), float("nan"), device="cuda"))
    del held
    yield


@contextlib.contextmanager
def filled_with_nan():
    """Deterministic mode, in which new tensors are full of NaN: an element that nobody sets
    shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def near_float64(
    attention,
    inputs,
    is_causal,
    allowed,
    layout="contiguous",
    runs=1,
    within=contextlib.nullcontext,
):
    """The results of each run on (q, k, v, do) under these strides, all as near to float64's."""
    truth = in_float64(*inputs, is_causal)
    inputs = [laid_out(x, layout) for x in inputs]
    made = []
    for _ in range(runs):
        with within():
            made.append(with_gradients(attention, *inputs, is_causal))
        shapes = tuple(inputs[0].shape), tuple(inputs[1].shape)
        assert_near(made[-1], truth, allowed, f"{shapes}, {layout}")
    return made


def random_inputs(q_shape, kv_shape, dtype, device="cpu", generator=None):
    """q, k, v, do from the unit normal distribution."""
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return [torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes]


def keys_for(n_queries, n_keys):
    """The number of keys nearest to n_keys of which a relative error says something: of one, dQ is
    0; one query of two random keys may have a dQ so small that o's rounding alone is 2 % of it."""
    return max(n_keys, 2 if n_queries > 1 else 16)


EDGES = (1, 63, 64, 65, 127, 128, 129, 256, 512, 1024)


def random_problem(draw, head_dim, dtype, groups, longest=2500):
    """For a GPU: q, k, v, do of lengths on and beside the edges of tiles, and their layout."""
    n_queries = draw.choice([draw.choice(EDGES), draw.randint(1, longest)])
    n_keys = draw.choice([draw.choice(EDGES), draw.randint(1, longest)])
    kv_heads = draw.randint(1, 3)
    q_shape = (draw.randint(1, 3), kv_heads * draw.choice(groups), n_queries, head_dim)
    kv_shape = (q_shape[0], kv_heads, keys_for(n_queries, n_keys), head_dim)
    return random_inputs(q_shape, kv_shape, dtype, "cuda"), draw.choice(LAYOUTS)


LAYOUTS = ("contiguous", "transposed", "d_strided", "sliced")


def laid_out(x, layout):
    """A (B, H, N, d) tensor's values under other strides; a slice lies in the midst of NaN."""
    if layout == "transposed":  # (B, N, H, d) in memory, as a model's projection leaves it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "d_strided":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "sliced":
        shape = [x.shape[0], x.shape[1] + 1, x.shape[2] + 7, x.shape[3] + 5]
        big = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
        big[:, 1:, 3:-4, 2:-3] = x
        return big[:, 1:, 3:-4, 2:-3]
    return x


@st.composite
def problems(draw, length, head_dim, dtypes, **others):
    """Grouped heads: shapes, dtype, mask, strides, a seed, and what else a test names."""
    dtype, d = draw(st.sampled_from(list(dtypes))), draw(head_dim)
    batch, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    return {
        "q": (batch, kv_heads * draw(st.integers(1, 2)), draw(length), d),
        # Through a softmax over a single key no gradient flows: nothing to be relative to.
        "kv": (batch, kv_heads, draw(length.filter(lambda n: n > 1)), d),
        "dtype": dtype,
        "is_causal": draw(st.booleans()),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "seed": draw(st.integers(0, 2**16)),
        **draw(st.fixed_dictionaries(others)),
    }


def drawn(problem):
    """Its q, k, v and do."""
    generator = torch.Generator().manual_seed(problem["seed"])
    return random_inputs(problem["q"], problem["kv"], problem["dtype"], generator=generator)
