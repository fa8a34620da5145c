"""Every form of the Gluon kernels on a Hopper GPU, at lengths on and beside the edges of tiles."""

import functools
import random

import attention_compare as compare
import pytest
import torch
from attention_compare import in_float64, near_float64, off_by, poison, random_inputs
from attention_standins import watch_steps

from a2lib.attention import FlashAttentionTriton, dispatch, flash_attention, launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ours = FlashAttentionTriton.apply


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Have them serve whatever they can, and keep nothing of what they served."""
    monkeypatch.setattr(dispatch, "in_one_launch", lambda *_: False)
    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: False)
    monkeypatch.setattr(dispatch, "in_one_sweep", lambda *_: True)
    monkeypatch.setattr(dispatch, "forward_consumers", lambda _: (2, False))
    monkeypatch.setattr(dispatch, "keys_per_chunk", lambda *_: 0)
    monkeypatch.setattr(launches, "_kept", {})


@pytest.fixture(params=[0, 128, 384])
def chunk(request, monkeypatch):
    """Queries of a chunk of every backward that the kernel can run; 0: uncut."""

    def queries(call):
        return request.param * dispatch._can_use_hopper(call)

    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: request.param > 0)
    monkeypatch.setattr(dispatch, "chunk_queries_of", queries)
    return request.param


def in_turns(monkeypatch, draw, form):
    """Where programs stay, which causal ones do for an even number of heads, few of them, so that
    each has many turns."""
    few = draw.choice([1, 2, 5])
    monkeypatch.setattr(launches, "n_multiprocessors", lambda _: few)

    def stays(call):
        return form[1] and not (call.causal and call.n_kv_heads % 2)

    def consumers(call):
        return form[0], form[1] and not (call.causal and call.n_heads % 2)

    monkeypatch.setattr(dispatch, "forward_consumers", consumers)
    monkeypatch.setattr(dispatch, "hopper_backward_stays", stays)
    monkeypatch.setattr(launches, "_kept", {})


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("form", compare.HOPPER_FORMS, ids=str)
def test_forms_of_the_forward(form, head_dim, is_causal, monkeypatch):
    if form[0] == 3 and head_dim > 64:
        pytest.skip("no such form")
    draw = random.Random(f"{form} {head_dim} {is_causal}")
    for i in range(6):
        in_turns(monkeypatch, draw, form)
        dtype = draw.choice(list(TOLERANCE))
        groups = (1,) if i % 2 else (2, 3)
        (q, k, v, do), layout = compare.random_problem(draw, head_dim, dtype, groups)
        truth = in_float64(q, k, v, do, is_causal)["o"]
        q, k, v = map(functools.partial(compare.laid_out, layout=layout), (q, k, v))
        for _ in range(3):
            with poison():
                o = flash_attention(q, k, v, is_causal=is_causal)
            assert off_by(o, truth) <= TOLERANCE[dtype], (q.shape, k.shape, layout, dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", compare.HOPPER_FORMS, ids=str)
def test_rows_whose_maximum_grows_from_block_to_block(form, head_dim, is_causal, monkeypatch):
    """By more and by less than what is rescaled for, in every row, in a few rows of a warp, in
    none: key blocks come from the last down, and the first keys are the largest."""
    if form[0] == 3 and head_dim > 64:
        pytest.skip("no such form")
    monkeypatch.setattr(dispatch, "forward_consumers", lambda _: form)
    n = 1300
    steps = torch.linspace(1, 0.02, n, device="cuda")[:, None]
    for dtype, tolerance in TOLERANCE.items():
        q, k, v, do = torch.randn(4, 2, n, head_dim, device="cuda", dtype=dtype)
        some_rows = (torch.rand(n, 1, device="cuda") < 0.02).to(dtype)
        for size in (1, 10, 60):
            for rows in (torch.ones_like(some_rows), some_rows, 1 - some_rows):
                queries, keys = (size * rows * q).to(dtype), (k * steps).to(dtype)
                truth = in_float64(queries, keys, v, do, is_causal)["o"]
                o = flash_attention(queries, keys, v, is_causal=is_causal)
                assert off_by(o, truth) <= tolerance, (dtype, size)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 128])
@pytest.mark.parametrize("stays", [False, True])
def test_backward(stays, head_dim, is_causal, chunk, monkeypatch):
    draw = random.Random(f"{stays} {head_dim} {is_causal}")
    for i in range(4):
        in_turns(monkeypatch, draw, (2, stays))
        dtype = draw.choice(list(TOLERANCE))
        groups = (2, 3) if i % 2 == 0 else (1,)
        inputs, layout = compare.random_problem(draw, head_dim, dtype, groups)
        near_float64(ours, inputs, is_causal, TOLERANCE[dtype], layout, runs=3, within=poison)


def test_the_order_of_additions_is_fixed_on_request(chunk):
    inputs = random_inputs((2, 4, 1500, 64), (2, 4, 1500, 64), torch.bfloat16, "cuda")
    with compare.filled_with_nan():
        runs = [compare.with_gradients(ours, *inputs, True) for _ in range(3)]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]), name
        assert torch.equal(runs[0][name], runs[2][name]), name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_in_the_order_of_the_tiles(head_dim, is_causal, monkeypatch):
    monkeypatch.setattr(dispatch, "ORDERED_PROGRAMS", 1)
    monkeypatch.setattr(launches, "_kept", {})
    with compare.filled_with_nan():
        for n_queries, n_keys in ((1500, 1500), (1100, 2300), (2300, 1100)):
            shapes = (3, 4, n_queries, head_dim), (3, 4, n_keys, head_dim)
            inputs = random_inputs(*shapes, torch.bfloat16, "cuda")
            near_float64(ours, inputs, is_causal, TOLERANCE[torch.bfloat16], runs=3, within=poison)
            runs = [compare.with_gradients(ours, *inputs, is_causal) for _ in range(100)]
            for run in runs:
                for name, result in run.items():
                    assert torch.equal(result, runs[0][name]), name


def test_some_gradients_alone():
    q, k, v, do = random_inputs((1, 2, 1200, 64), (1, 2, 1200, 64), torch.bfloat16, "cuda")
    truth = in_float64(q, k, v, do, True)
    k.requires_grad_()
    flash_attention(q, k, v, is_causal=True).backward(do)
    assert off_by(k.grad, truth["dk"]) < TOLERANCE[torch.bfloat16]


def test_rows_whose_scores_are_all_minus_infinity_are_zero():
    q, k, v, do = random_inputs((1, 2, 300, 64), (1, 2, 300, 64), torch.bfloat16, "cuda")
    q[..., 0] = q[..., 0].abs() + 0.1
    k[..., :200, 0] = -torch.inf
    o = flash_attention(q, k, v, is_causal=True)
    assert (o[..., :200, :] == 0).all() and o.isfinite().all()


@pytest.mark.parametrize("head_dim, n", [(64, 8192), (128, 4096), (80, 5000)])
def test_long_rows_of_few_heads_in_chunks(head_dim, n, monkeypatch):
    """As dispatched: the rule's chunk, run twice, the second time as what ran before."""
    monkeypatch.undo()
    monkeypatch.setattr(launches, "_kept", {})
    steps = []
    watch_steps(monkeypatch, steps)
    inputs = random_inputs((1, 1, n, head_dim), (1, 1, n, head_dim), torch.bfloat16, "cuda")
    near_float64(ours, inputs, True, TOLERANCE[torch.bfloat16], runs=2, within=poison)
    kernels = [step.kernel for step in steps]
    assert kernels.count("hopper_backward") == kernels.count("finish") == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_in_a_graph_and_after_other_sizes(head_dim, chunk):
    shape = (2, 4, 1100, head_dim)
    q, k, v, do = random_inputs(shape, shape, torch.bfloat16, "cuda")
    for x in (q, k, v):
        x.requires_grad_()

    def both():
        return torch.autograd.grad(flash_attention(q, k, v, is_causal=True), (q, k, v), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        new = random_inputs(shape, shape, torch.bfloat16, "cuda")
        with torch.no_grad():
            for x, y in zip((q, k, v, do), new, strict=True):
                x.copy_(y)
        graph.replay()
        truth = in_float64(*new, True)
        for name, got in zip(("dq", "dk", "dv"), captured, strict=True):
            assert off_by(got, truth[name]) < TOLERANCE[torch.bfloat16], name
