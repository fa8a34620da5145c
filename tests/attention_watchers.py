"""Who looks at a call of attention, and what each must find: on a CPU and on a GPU."""

import os
import socket
import warnings

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from a2lib.attention import FlashAttentionTriton, attention_reference, flash_attention

FORWARD = torch.ops.a2lib.flash_forward.default
BACKWARD = torch.ops.a2lib.flash_backward.default


def ours(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def handout(q, k, v):
    return FlashAttentionTriton.apply(q, k, v, True)


ATTENTIONS = (ours, handout)


def inputs(device, n=3):
    """q, k, v and more like q, as a model's projections lie."""
    x = torch.randn(n, 2, 40, 4, 16, device=device).half()
    return x.transpose(2, 3).unbind(0)


def forward(attention):
    return lambda q, k, v: (attention(q.detach(), k.detach(), v.detach()),)


def both(attention):
    def passes(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves)
        return o, *torch.autograd.grad(o.float().square().sum(), leaves)

    return passes


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


# Modes.


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(operator)
        return operator(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


# Tracers: (the operators of a graph, the graph as a function).


def by_make_fx(call, qkv, **options):
    graph = make_fx(call, **options)(*qkv)
    return [node.target for node in graph.graph.nodes], graph


def by_export(call, qkv, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    program = torch.export.export(Module(), tuple(qkv), strict=strict)
    return [node.target for node in program.graph.nodes], program.module()


def by_jit(call, qkv):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's conditions; and that it is deprecated
        traced = torch.jit.trace(call, tuple(qkv))
    return [FORWARD] if "a2lib::flash_forward" in str(traced.graph) else [], traced


def by_compile(call, qkv, **options):
    seen = []

    def backend(graph, example):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True, **options)
    compiled(*qkv)
    return seen, compiled


def in_turn(tracer, **options):
    return lambda call, qkv: tracer(call, qkv, **options)


OF_BOTH_PASSES = {
    "make_fx": in_turn(by_make_fx),
    "make_fx, fake": in_turn(by_make_fx, tracing_mode="fake"),
    "make_fx, symbolic": in_turn(by_make_fx, tracing_mode="symbolic"),
}
OF_THE_FORWARD = {
    **OF_BOTH_PASSES,
    "make_fx, before dispatch": in_turn(by_make_fx, pre_dispatch=True),
    "export": in_turn(by_export, strict=False),
    "export, strict": in_turn(by_export, strict=True),
    "jit": by_jit,
    "compile": by_compile,
    "compile, dynamic": in_turn(by_compile, dynamic=True),
}


def check_traced(tracer, call, device, wanted):
    """The graph has the operators, and is right for tensors that it was not made with."""
    operators, graph = tracer(call, inputs(device))
    assert [x for x in operators if x in (FORWARD, BACKWARD)] == wanted
    other = inputs(device)
    got = graph(*other)
    assert_same(got, call(*other))


# Subclasses.


class Marked(torch.Tensor):
    """Knows of nothing."""


class Closed(torch.Tensor):
    """Has no memory, and refuses every operator."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return NotImplemented


# One rank.


def check_dtensors(device):
    """Each placement has the result of plain tensors, and stays as it is where it may."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (1,))
        qkv = inputs(device)
        for attention in ATTENTIONS:
            want = both(attention)(*qkv)
            for place in (Replicate(), Shard(0), Shard(1), Shard(2)):
                leaves = [distribute_tensor(x, mesh, [place]).requires_grad_() for x in qkv]
                o = attention(*leaves)
                got = o, *torch.autograd.grad(o.float().square().sum(), leaves)
                assert_same([x.to_local() for x in got], want)
                assert o.placements[0] == (Replicate() if place == Shard(2) else place)
    finally:
        dist.destroy_process_group()


# In place.


def check_in_place(attention, shape, device):
    """Right where nothing is differentiated, refused in PyTorch's one line where it is."""
    q, k, v = torch.randn(3, *shape, device=device).half().unbind(0)
    with torch.no_grad():
        want = attention_reference(q, k, v, True) + 1
        o = attention(q, k, v)
        o += 1
        assert_same([o], [want])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves)
    assert not o._is_view(), "of which autograd says much, and nothing clear"
    o += q
    try:
        o.sum().backward()
    except RuntimeError as error:
        said = str(error)
    else:
        said = "nothing"
    assert "modified by an inplace operation" in said and "\n" not in said
    o = attention(*leaves) + 0
    o += q
    o.sum().backward()
    assert leaves[0].grad is not None
