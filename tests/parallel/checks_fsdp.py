"""FSDP against one process, and what it keeps in memory."""

import contextlib
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
    optimizers_of,
    raises,
    same,
    take_step,
    token_batches,
    world,
)
from torch import nn

from a2lib.model import TransformerLM
from a2lib.parallel import FSDP, BucketedDDP


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
    rows = dict(fsdp.module.named_parameters())
    for name, p in reference.named_parameters():
        same(rows.pop(name).detach(), mine_of(p.detach(), group), f"{what} {name}")
    assert not rows, what


def check_freed(fsdp):
    for unit in fsdp._units:
        for p in unit.sharded:
            assert p.buffer.untyped_storage().nbytes() == 0, p.names


class Stack(nn.Module):
    def __init__(self, width=6, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.Sequential()
        for _ in range(blocks):
            self.blocks.append(checking.Residual(width))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


BOTH = FSDP, functools.partial(copied, FSDP)  # by the backend, and by copy engines


class Plain(nn.Module):
    """Fewer rows than four ranks, rows that these do not divide, no ModuleList."""

    def __init__(self):
        super().__init__()
        self.thin, self.wide = nn.Linear(5, 3), nn.Linear(3, 6)
        self.deep = nn.Parameter(torch.empty(5, 2, 3))

    def forward(self, batch):
        return self.wide(self.thin(batch)).sum() + (self.deep * batch[0, 0]).sum()


@check(4)
def fsdp_shards_for_more_ranks_than_rows():
    """By exact sums, in a step of SGD and a clipped one of AdamW."""
    for make in BOTH:
        shard_for_more_ranks_than_rows(make)


def shard_for_more_ranks_than_rows(make):
    rank, size = world()
    reference = checking.exact(Plain())
    fsdp = make(checking.moved(reference, rank))
    check_weights(fsdp, reference, "wrapped")
    assert fsdp.module.thin.weight.shape == [(1, 5), (1, 5), (1, 5), (0, 5)][rank]
    assert fsdp.module.deep.shape == [(2, 2, 3), (2, 2, 3), (1, 2, 3), (0, 2, 3)][rank]
    batches = torch.randint(-4, 5, (size, 4, 5)).float()
    losses = checking.losses_of(checking.output_sum, batches)
    steps = optimizers_of((fsdp, reference), torch.optim.SGD, lr=0.25)
    backward_of_each(fsdp, reference, losses)
    check_gradients(fsdp, reference, "four ranks")
    take_step(*steps)
    check_weights(fsdp, reference, "stepped")

    steps = optimizers_of((fsdp, reference), torch.optim.AdamW, lr=0.25, fused=True)
    backward_of_each(fsdp, reference, losses)
    norm = fsdp.clip_grad_norm_(0.5)
    whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, foreach=False)
    assert torch.allclose(norm, whole)
    for p, q in zip(fsdp.module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, mine_of(q.grad))
        p.grad = mine_of(q.grad).clone()
    take_step(*steps)
    weights = fsdp.gather_full_params()
    for name, p in reference.named_parameters():
        assert torch.allclose(weights[name], p, atol=1e-6), name


def in_low_precision(module, dtype):
    """Return the module so that it computes in one process as ``compute_dtype`` says: matrices and
    their modules' biases are cast, inputs too; norms are not, and their inputs are what their
    weights are."""
    masters = {}

    def cast_input_of_norm(norm, args):
        return args[0].to(norm.weight.dtype)

    def cast(owner, args):
        for name, p in masters[owner].items():
            owner._parameters[name] = p.to(dtype)
        x, *rest = args
        return x.to(dtype) if x.is_floating_point() else x, *rest

    def put_back(owner, args, output):
        owner._parameters.update(masters[owner])

    for owner in list(module.modules()):
        if isinstance(owner, nn.LayerNorm):
            owner.register_forward_pre_hook(cast_input_of_norm)
        if isinstance(owner._parameters.get("weight"), nn.Parameter) and owner.weight.dim() == 2:
            masters[owner] = dict(owner.named_parameters(recurse=False))
            owner.register_forward_pre_hook(cast)
            owner.register_forward_hook(put_back)
    return module


def computes_in_low_precision(make, dtype, first):
    rank, size = world()
    fsdp, reference = make(copy.deepcopy(first), compute_dtype=dtype), copy.deepcopy(first)
    computing = in_low_precision(reference, dtype)
    optimizers = optimizers_of((fsdp, reference), torch.optim.SGD, lr=0.5)
    batches = token_batches(3 * size)
    for step in range(3):
        tokens = batches[step * size :][:size]
        with torch.no_grad():
            assert fsdp(tokens[rank]).dtype == dtype
        backward_of_each(fsdp, computing, list(map(loss_on, tokens)))
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
    output = low(torch.randn(2, 4).bfloat16())
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    low.finish_gradient_synchronization()
    for p in low.parameters():
        assert p.dtype == p.grad.dtype == torch.float32


@check(2)
def fsdp_gathers_weights_that_have_changed():
    """A forward without a backward, then weights that change, then one with."""
    module = Stack()
    reference = copy.deepcopy(module)
    fsdp = FSDP(module)
    tokens = token_batches(1)[0]
    with torch.no_grad():
        fsdp(tokens)
        for p in (*fsdp.parameters(), *reference.parameters()):
            p.mul_(2)
    same(fsdp(tokens), reference(tokens))
    same(fsdp.module.blocks[0](torch.ones(2, 6)), reference.blocks[0](torch.ones(2, 6)))
    fsdp.finish_gradient_synchronization()
    assert not checking.gradients(fsdp)


@check(2)
def fsdp_refuses():
    rank, _ = world()
    module = Stack()
    fsdp = FSDP(module)
    for part in (module, nn.Sequential(module)):
        with raises(ValueError, "a parameter is a shard of FSDP"):
            FSDP(part)
    with raises(RuntimeError, "before it is wrapped"):
        fsdp.double()
    for part in (fsdp, module, module.blocks[0], module.blocks[0].up):
        with raises(TypeError, "cannot be copied or pickled; use gather_full_params"):
            copy.deepcopy(part)
    for name in ("weight", "bias"):
        p = module.head.get_parameter(name)
        p.requires_grad_(False)
        with raises(RuntimeError, f"head.{name} was frozen or thawed"):
            fsdp.finish_gradient_synchronization()
        p.requires_grad_(True)
    with raises(ValueError, "compute_dtype must be a floating dtype or None; got torch.int8"):
        FSDP(Stack(), compute_dtype=torch.int8)
    with raises(ValueError, r"rank 0 has weight \(2, 4\) float32 trained, rank 1 weight \(2, 5\)"):
        FSDP(nn.Linear(4 + rank, 2))


SEVERAL_TENSORS = (
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "allreduce_coalesced",
)  # fmt: skip


def not_supported(*_):
    raise RuntimeError("Backend nccl does not support several tensors in one call")


@contextlib.contextmanager
def group_that_compares_each_call():
    """A group as TORCH_DISTRIBUTED_DEBUG=DETAIL makes it. With NCCL it has no calls of several
    tensors in torch 2.11; with gloo in 2.13 it has them, and here none."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    refused = dict.fromkeys(SEVERAL_TENSORS, not_supported)
    try:
        with patch.multiple(dist.ProcessGroup, create=True, **refused):
            yield dist.new_group()
    finally:
        dist.set_debug_level(before)


@check(2)
def wrappers_do_without_several_tensors_in_one_call():
    _, size = world()
    losses = list(map(loss_on, token_batches(size)))
    first = Stack()
    with group_that_compares_each_call() as group:
        fsdp, reference = FSDP(copy.deepcopy(first), group=group), copy.deepcopy(first)
        backward_of_each(fsdp, reference, losses)
        check_gradients(fsdp, reference, "FSDP")
        ddp = BucketedDDP(copy.deepcopy(first), 0.001, group)
        backward_of_each(ddp, reference, losses)
        checking.same_gradients(ddp.module, reference, "DDP")


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
    fsdp = FSDP(module, compute_dtype=torch.bfloat16)
    plain = FSDP(first, compute_dtype=torch.bfloat16)
    loss = loss_on(token_batches(size)[rank])
    for _ in range(2):
        for wrapped in (fsdp, plain):
            wrapped.zero_grad()
            loss(wrapped).backward()
            wrapped.finish_gradient_synchronization()
        for p, q in zip(fsdp.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=0.1, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    assert fsdp.gather_full_params().keys() == plain.gather_full_params().keys()
