"""Attention as tracers, modes and tensor subclasses see it: right, or refused in one line."""

import warnings

import pytest
import torch
from refusals import refused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from a2lib.attention import FlashAttentionTriton, attention_reference, flash_attention
from a2lib.errors import UnsupportedError

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
pytestmark = on_cpu


def causal(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def handout(q, k, v):
    return FlashAttentionTriton.apply(q, k, v, True)


both = pytest.mark.parametrize("attention", [causal, handout])


def three(*shape, wants=True, **options):
    return [torch.randn(*shape, requires_grad=wants, **options) for _ in range(3)]


def with_gradients(attention, q, k, v):
    o = attention(q, k, v)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v))


def close(got, want):
    return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(got, want, strict=True))


@both
def test_fake_tensors_have_shapes_strides_and_gradients(attention):
    with FakeTensorMode():
        fakes = three(2, 4, 20, 16)
        o, *gradients = with_gradients(attention, *fakes)
        assert o.shape == (2, 4, 20, 16) and o.stride() == (1280, 16, 64, 1)
        assert [x.shape for x in gradients] == [x.shape for x in fakes]
        # Of a GPU that is not there; torch itself differentiates none such without CUDA.
        with torch.no_grad():
            o = attention(*(torch.empty(2, 4, 20, 16, device="cuda") for _ in range(3)))
        assert o.device.type == "cuda"


@both
def test_tensors_without_memory(attention):
    tensors = three(2, 4, 20, 16, device="meta")
    o, *gradients = with_gradients(attention, *tensors)
    assert o.is_meta and o.shape == gradients[0].shape == (2, 4, 20, 16)
    assert all(x.is_meta for x in gradients)


@both
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_has_both_operators(attention, mode):
    traced = make_fx(lambda q, k, v: with_gradients(attention, q, k, v), tracing_mode=mode)
    traced = traced(*three(2, 4, 20, 16))
    targets = [node.target for node in traced.graph.nodes]
    for operator in (torch.ops.a2lib.flash_forward, torch.ops.a2lib.flash_backward):
        assert targets.count(operator.default) == 1
    others = three(2, 4, 20, 16)
    assert close(traced(*others), with_gradients(attention, *others))


@both
def test_jit_trace(attention):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        traced = torch.jit.trace(attention, three(2, 4, 20, 16, wants=False))
    others = three(2, 4, 31, 16)
    assert close(with_gradients(traced, *others), with_gradients(attention, *others))


class Attention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, q, k, v):
        return self.attention(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_length_that_changes(strict):
    tokens = torch.export.Dim("tokens", min=2, max=256)
    shapes = {name: {2: tokens} for name in "qkv"}
    module, inputs = Attention(causal), three(2, 4, 20, 16, wants=False)
    program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.a2lib.flash_forward.default) == 1
    others = three(2, 4, 33, 16, wants=False)
    assert close([program.module()(*others)], [causal(*others)])


def products(q_shape, k_shape):
    *leading, n_queries, d = q_shape
    return 2 * torch.Size(leading).numel() * n_queries * k_shape[-2] * d


@both
@pytest.mark.parametrize("shapes", [((2, 4, 20, 16), (2, 2, 33, 16)), ((20, 16), (33, 16))])
def test_operations_are_counted_as_pytorch_counts_its_own(attention, shapes):
    q, (k, v) = torch.randn(shapes[0]), torch.randn(2, *shapes[1])
    for x in (q, k := k.clone(), v := v.clone()):
        x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        o = attention(q, k, v)
    assert counter.get_total_flops() == 2 * products(*shapes)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 5 * products(*shapes)


class Quiet(torch.Tensor):
    """A subclass that changes nothing."""


class Deaf(torch.Tensor):
    """A subclass whose own dispatch knows no operator."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return NotImplemented


def test_a_subclass_is_computed_or_refused():
    plain = three(2, 4, 20, 16)
    quiet = [x.detach().as_subclass(Quiet).requires_grad_() for x in plain]
    assert close(with_gradients(causal, *quiet), with_gradients(causal, *plain))
    deaf = [Deaf(x.detach()) for x in plain]
    refused("runs no Deaf", flash_attention, *deaf, error=UnsupportedError)
    parameters = [nn.Parameter(x.detach()) for x in plain]
    assert close(with_gradients(causal, *parameters), with_gradients(causal, *plain))


@pytest.mark.parametrize("attention", [flash_attention, attention_reference])
def test_nested_and_sparse_tensors_are_refused(attention):
    rows = [torch.randn(4, n, 16) for n in (5, 7)]
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nested tensors are a prototype
            nested = torch.nested.nested_tensor(rows, layout=layout)
        refused("no nested tensors", attention, nested, nested, nested)
    sparse = torch.randn(3, 4).to_sparse()
    refused("no sparse tensors", attention, sparse, sparse, sparse)


@both
@pytest.mark.parametrize("shape", [(2, 4, 20, 16), (2, 3, 4, 20, 16), (3, 20, 16), (20, 16)])
def test_the_output_is_no_view_and_its_change_in_place_is_told(attention, shape):
    tensors = three(*shape)
    o = attention(*tensors)
    assert not o._is_view()
    with torch.no_grad():
        attention(*tensors).add_(1)
    o += 1
    refused("write o = o . x", o.sum().backward, error=RuntimeError)
    o = attention(*tensors) + 1
    o += 1
    o.sum().backward()


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this one process."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@both
@pytest.mark.parametrize("dim, kept", [(0, True), (1, True), (2, False), (3, False)])
def test_dtensors_stay_sharded_by_batch_and_heads(mesh, attention, dim, kept):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = three(2, 4, 20, 16)
    k, v = (x.detach()[:, :2].requires_grad_() for x in (k, v))
    sharded = [
        distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)
    ]
    found = with_gradients(attention, *sharded)
    place = Shard(dim) if kept else Replicate()
    assert all(x.placements == (place,) for x in found)
    assert close([x.full_tensor() for x in found], with_gradients(attention, q, k, v))


IN_TWO_PROCESSES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from a2lib.attention import attention_reference, flash_attention

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
for heads, kv_heads, sharded in ((4, 2, True), (6, 3, False)):
    tensors = [torch.randn(2, n, 20, 16) for n in (heads, kv_heads, kv_heads)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    want = attention_reference(*leaves, True)
    want.sum().backward()
    placed = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in tensors]
    o = flash_attention(*placed, is_causal=True)
    o.sum().backward()
    assert (o.placements == (Shard(1),)) == sharded, o.placements
    torch.testing.assert_close(o.full_tensor(), want)
    for x, y in zip(placed, leaves):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, atol=1e-5, rtol=1e-4)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_dtensors_of_two_processes(tmp_path):
    import os
    import subprocess
    import sys

    script = tmp_path / "ranks.py"
    script.write_text(IN_TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]
