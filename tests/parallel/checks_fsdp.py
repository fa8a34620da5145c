"""FSDP against one process, and what it keeps in memory."""

import copy
import functools
import itertools
import warnings
from unittest.mock import patch

import checking
import torch
import torch.distributed as dist
from checking import (
    backward_of_each,
    check,
    copied,
    loss_on,
    raises,
    same,
    take_step,
    token_batches,
    world,
)
from torch import nn

from a2lib.model import TransformerLM
from a2lib.parallel import FSDP, BucketedDDP, group


def mine_of(whole, group=None):
    if whole.dim() < 2 or not whole.numel():
        return whole
    rows = -(-whole.shape[0] // dist.get_world_size(group))
    return whole[dist.get_rank(group) * rows :][:rows]


def check_gradients(fsdp, reference, what):
    checking.same_gradients(fsdp.module, reference, what, mine_of)


def check_weights(fsdp, reference, what, group=None):
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    checking.same_by_name(fsdp.gather_full_params(), theirs, what)
    parts = {name: mine_of(p, group) for name, p in reference.named_parameters()}
    checking.same_by_name(dict(fsdp.module.named_parameters()), parts, what)


def check_freed(fsdp):
    for unit in fsdp._units:
        for p in unit.sharded:
            assert p.buffer.untyped_storage().nbytes() == 0, p.names


class Stack(nn.Module):
    def __init__(self, width=6, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.Sequential(*(checking.Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


BOTH = FSDP, functools.partial(copied, FSDP)  # by the backend, and by copy engines


@check(4)
def fsdp_shards_for_more_ranks_than_rows():
    """Fewer rows than ranks, rows that the world does not divide, no ModuleList; exact sums."""
    for make in BOTH:
        shard_for_more_ranks_than_rows(make)


def shard_for_more_ranks_than_rows(make):
    rank, size = world()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.thin, self.wide = nn.Linear(5, 3), nn.Linear(3, 6)
            self.deep = nn.Parameter(torch.empty(5, 2, 3))

        def forward(self, x):
            return self.wide(self.thin(x)).sum() + (self.deep * x[0, 0]).sum()

    reference = checking.exact(Plain())
    fsdp = make(checking.moved(reference, rank))
    check_weights(fsdp, reference, "wrapped")
    shapes = [(1, 5), (1, 5), (1, 5), (0, 5)]
    assert fsdp.module.thin.weight.shape == shapes[rank]
    assert fsdp.module.deep.shape == [(2, 2, 3), (2, 2, 3), (1, 2, 3), (0, 2, 3)][rank]
    batches = [torch.randint(-4, 5, (4, 5)).float() for _ in range(size)]
    for optimizer in (torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)):
        steps = [optimizer(m.parameters(), lr=0.25) for m in (fsdp, reference)]
        backward_of_each(fsdp, reference, [lambda m, x=x: m(x) for x in batches])
        if optimizer is torch.optim.SGD:  # after a clipped step sums round
            check_gradients(fsdp, reference, "four ranks")
        norm = fsdp.clip_grad_norm_(0.5)
        whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, foreach=False)
        assert torch.allclose(norm, whole)
        for p, q in zip(fsdp.module.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.grad, mine_of(q.grad))
            p.grad = mine_of(q.grad).clone()
        take_step(*steps)
        if optimizer is torch.optim.SGD:
            check_weights(fsdp, reference, "stepped")


def in_low_precision(module, dtype):
    """What ``compute_dtype`` says, in one process: matrices and their modules' biases are cast,
    inputs too; norms are not, and their inputs are what their weights are."""
    for owner in list(module.modules()):
        if isinstance(owner, nn.LayerNorm):
            owner.register_forward_pre_hook(
                lambda m, args: tuple(x.to(m.weight.dtype) for x in args)
            )
        mine = {n: p for n, p in owner._parameters.items() if p is not None}
        if not any(p.dim() >= 2 for p in mine.values()):
            continue

        def cast(module, args, masters=mine):
            for name, p in masters.items():
                module._parameters[name] = p.to(dtype)
            return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)

        def back(module, args, output, masters=mine):
            module._parameters.update(masters)

        owner.register_forward_pre_hook(cast)
        owner.register_forward_hook(back)
    return module


def computes_in_low_precision(make, dtype, first):
    rank, size = world()
    fsdp, reference = make(copy.deepcopy(first), compute_dtype=dtype), copy.deepcopy(first)
    computing = in_low_precision(reference, dtype)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (fsdp, reference)]
    batches = iter(token_batches(3 * size))
    for step in range(3):
        tokens = [next(batches) for _ in range(size)]
        with torch.no_grad():
            assert fsdp(tokens[rank]).dtype == dtype
        backward_of_each(fsdp, computing, [loss_on(t) for t in tokens])
        assert {p.grad.dtype for p in fsdp.parameters()} == {torch.float32}
        check_gradients(fsdp, reference, f"{dtype} {type(first).__name__} {step}")
        take_step(*optimizers)
        check_weights(fsdp, reference, f"{dtype}, {step}")


@check(2)
def fsdp_computes_in_low_precision():
    """To the bit as one process that casts; masters, gradients and their mean are float32."""
    models = Stack(), TransformerLM(11, 8, 8, 2, 2, 16, attention="eager", seed=0)
    for make, dtype, first in itertools.product(BOTH, (torch.bfloat16, torch.float16), models):
        computes_in_low_precision(make, dtype, first)
    low = FSDP(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16())
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    output = low(torch.randn(2, 4).bfloat16())
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    low.finish_gradient_synchronization()
    assert {p.grad.dtype for p in low.parameters()} == {torch.float32}


@check(2)
def fsdp_refuses():
    rank, _ = world()
    module = Stack()
    reference = copy.deepcopy(module)
    fsdp = FSDP(module)
    tokens = token_batches(1)[0]
    # A forward without a backward, then weights that change, then one with.
    with torch.no_grad():
        fsdp(tokens)
        for p in (*fsdp.parameters(), *reference.parameters()):
            p.mul_(2)
    same(fsdp(tokens), reference(tokens))
    same(fsdp.module.blocks[0](torch.ones(2, 6)), reference.blocks[0](torch.ones(2, 6)))
    for again in (torch.no_grad, torch.enable_grad):
        with again(), raises(RuntimeError, "forward before this one has had no backward: call in"):
            fsdp(tokens)
    fsdp.finish_gradient_synchronization()
    assert all(p.grad is None for p in fsdp.parameters())

    for part in (module, nn.Sequential(module)):
        with raises(ValueError, "a parameter is a shard of FSDP"):
            FSDP(part)
    with raises(RuntimeError, "before it is wrapped"):
        fsdp.double()
    for part in (fsdp, module, module.blocks[0], module.head, module.blocks[0].up):
        with raises(TypeError, "cannot be copied or pickled; use gather_full_params"):
            copy.deepcopy(part)
    for p, name in ((module.head.weight, "head.weight"), (module.head.bias, "head.bias")):
        p.requires_grad_(False)
        with raises(RuntimeError, f"{name} was frozen or thawed"):
            fsdp.finish_gradient_synchronization()
        p.requires_grad_(True)
    with raises(ValueError, "compute_dtype must be a floating dtype or None; got torch.int8"):
        FSDP(Stack(), compute_dtype=torch.int8)
    with raises(ValueError, r"rank 0 has weight \(2, 4\) float32 trained, rank 1 weight \(2, 5\)"):
        FSDP(nn.Linear(4 + rank, 2))


@check(2)
def fsdp_goes_no_further_behind_an_error():
    """In the forward, in the loss, half way through the backward."""
    tokens = token_batches(1)[0]

    def raises_in(module, part):
        handle = module.register_forward_pre_hook(lambda *_: 1 / 0)
        if part == "backward":
            handle.remove()
            handle = module.register_full_backward_hook(lambda *_: 1 / 0)
        return handle

    for part, make in itertools.product(("forward", "loss", "backward"), BOTH):
        fsdp = make(Stack())
        if part == "loss":
            fsdp(tokens)
        else:
            handle = raises_in(fsdp.module.blocks[1].norm, part)
            with raises(ZeroDivisionError, "division"):
                loss_on(tokens)(fsdp).backward()
            handle.remove()
        if part == "forward":
            check_freed(fsdp)
        line = "a backward has not come to" if part == "backward" else "forward before this one"
        with raises(RuntimeError, line):
            fsdp(tokens)
    with raises(RuntimeError, "a backward has not come to"):
        fsdp.finish_gradient_synchronization()


@check(2)
def wrappers_do_without_several_tensors_in_one_call():
    """As under TORCH_DISTRIBUTED_DEBUG=DETAIL, where a group has no such calls."""
    rank, size = world()
    losses = [*map(loss_on, token_batches(size))]
    for make in (FSDP, lambda module: BucketedDDP(module, 0.001)):
        first = Stack()
        wrapper, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        with patch.object(group, "_checks_each_call", lambda: True):
            backward_of_each(wrapper, reference, losses)
        part = mine_of if make is FSDP else lambda whole: whole
        checking.same_gradients(wrapper.module, reference, part=part)


@check(2)
def fsdp_leaves_compiled_blocks_one_graph():
    """Compiled before wrapping, by either way; nothing is compiled again, and no graph breaks."""
    from torch._dynamo.utils import counters

    rank, size = world()
    warnings.simplefilter("default")  # torch's own, while it compiles
    first = Stack(blocks=2)
    module = copy.deepcopy(first)
    blocks = module.blocks
    blocks[0] = torch.compile(blocks[0], backend="aot_eager", fullgraph=True)
    blocks[1].compile(backend="aot_eager")
    torch._dynamo.reset()
    counters.clear()
    fsdp, plain = (FSDP(m, compute_dtype=torch.bfloat16) for m in (module, first))
    for tokens in (token_batches(size)[rank],) * 2:
        for wrapped in (fsdp, plain):
            wrapped.zero_grad()
            loss_on(tokens)(wrapped).backward()
            wrapped.finish_gradient_synchronization()
        for p, q in zip(fsdp.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=0.1, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    assert fsdp.gather_full_params().keys() == plain.gather_full_params().keys()
