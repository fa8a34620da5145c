"""Attention on a GPU as tracers, modes and tensor subclasses see it."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from a2lib.attention import FlashAttentionTriton, attention_reference, flash_attention

pytestmark = pytest.mark.gpu


def causal(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def handout(q, k, v):
    return FlashAttentionTriton.apply(q, k, v, True)


both = pytest.mark.parametrize("attention", [causal, handout])
shapes = pytest.mark.parametrize("heads, n", [(2, 100), (16, 1024)])


def three(heads, n, wants=True):
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": wants}
    return [torch.randn(2, heads, n, 64, **options) for _ in range(3)]


def with_gradients(attention, q, k, v):
    o = attention(q, k, v)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v))


def assert_right(got, q, k, v):
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = with_gradients(lambda *x: attention_reference(*x, True), *exact)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 2e-2 * y.norm()


@both
def test_fake_tensors(attention):
    """And the context is whole after it."""
    with FakeTensorMode():
        o, *gradients = with_gradients(attention, *three(4, 300))
        assert o.shape == gradients[0].shape == (2, 4, 300, 64) and o.is_cuda
    tensors = three(4, 300)
    assert_right(with_gradients(attention, *tensors), *tensors)


@both
@shapes
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(attention, heads, n, mode):
    traced = make_fx(lambda q, k, v: with_gradients(attention, q, k, v), tracing_mode=mode)
    traced = traced(*three(heads, n))
    others = three(heads, n)
    assert_right(traced(*others), *others)


@both
@shapes
def test_jit_trace(attention, heads, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        traced = torch.jit.trace(attention, three(heads, n, wants=False), check_trace=False)
    others = three(heads, n + 28)
    assert_right(with_gradients(traced, *others), *others)


@both
@shapes
def test_operations_are_counted_as_those_of_sdpa(attention, heads, n):
    counts = []
    for attend in (attention, torch.nn.functional.scaled_dot_product_attention):
        tensors = three(heads, n)
        with FlopCounterMode(display=False) as counter:
            with_gradients(attend, *tensors)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@shapes
def test_in_place_on_an_output_that_nobody_differentiates(heads, n):
    tensors = three(heads, n)
    with torch.no_grad():
        o = causal(*tensors)
        want = o + 1
        o += 1
    assert torch.equal(o, want)
    o = causal(*tensors)
    o += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        o.sum().backward()


@both
@shapes
def test_dtensors(tmp_path, attention, heads, n):
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        tensors = three(heads, n)
        for dim in range(4):
            sharded = [distribute_tensor(x.detach(), mesh, [Shard(dim)]) for x in tensors]
            found = with_gradients(attention, *(x.requires_grad_() for x in sharded))
            assert_right([x.full_tensor() for x in found], *tensors)
    finally:
        dist.destroy_process_group()
