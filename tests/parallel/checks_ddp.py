"""The four data parallel classes against one process."""

import copy
import functools
from contextlib import nullcontext

import checking
import torch
from checking import (
    Tied,
    check,
    copied,
    loss_on,
    raises,
    same,
    same_gradients,
    same_parameters,
    world,
)
from torch import nn

from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, FSDP, BucketedDDP, FlatDDP, NaiveDDP

KINDS = {
    "NaiveDDP": NaiveDDP,
    "FlatDDP": FlatDDP,
    "DDP": DDP,
    "BucketedDDP some": functools.partial(BucketedDDP, bucket_size_mb=0.0005),
    "BucketedDDP one": functools.partial(BucketedDDP, bucket_size_mb=100),
    "BucketedDDP some, copied": functools.partial(copied, BucketedDDP, bucket_size_mb=0.0005),
}


HOOKED = [kind for kind in KINDS if kind not in ("NaiveDDP", "FlatDDP")]


class Odd(nn.Module):
    """Several dtypes, a scalar, an empty parameter, strides that are not contiguous."""

    def __init__(self):
        super().__init__()
        self.fp64 = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.randn(5, 4, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("flag", torch.rand(3) < 0.5)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        y = x.double() @ self.fp64 @ self.bf16.double() @ self.transposed.double()
        image = self.conv(x.repeat(2, 6, 1).view(1, 3, 4, -1))
        return (y * self.scalar).sum() + image.square().sum() + self.empty.sum()


@check(2)
def ddp_takes_any_dtype_and_layout():
    rank, size = world()
    first = Odd()
    batches = [torch.randn(5, 3) for _ in range(size)]
    for kind, make in KINDS.items():
        module, reference = checking.moved(first, rank), copy.deepcopy(first)
        ddp = make(module)
        same_parameters(module, reference, kind)
        same(module.flag, reference.flag)
        same(module.count, reference.count)
        checking.backward_of_each(ddp, reference, [lambda m, x=x: m(x) for x in batches])
        same_gradients(module, reference, kind)
        assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@check(4)
def ddp_is_exact_for_four_where_every_sum_is():
    """A linear function of small whole numbers: no order of the sum rounds."""
    rank, size = world()
    first = checking.exact(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    batches = [torch.randint(-4, 5, (4, 5)).float() for _ in range(size)]
    for kind, make in KINDS.items():
        ddp, reference = make(checking.moved(first, rank)), copy.deepcopy(first)
        checking.backward_of_each(ddp, reference, [lambda m, x=x: m(x).sum() for x in batches])
        same_gradients(ddp.module, reference, kind)


@check(2)
def ddp_ranks_may_make_gradients_in_different_orders():
    """Each rank uses two equal layers in its own order, and one of them later not at all: pairing
    by arrival would mix them without an error."""
    rank, size = world()
    first = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    batches = [torch.randn(3, 4) for _ in range(size)]

    def loss(module, step, r):
        x = batches[r]
        for layer in [module[0], module[1]] if (r + step) % 2 else [module[1], module[0]]:
            if step < 2 or layer is module[r]:
                x = layer(x).tanh()
        return x.sum()

    for kind, make in KINDS.items():
        ddp, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        for step in range(4):
            ddp.zero_grad()
            loss(ddp.module, step, rank).backward()
            ddp.finish_gradient_synchronization()
            checking.mean_gradients(
                reference, [[lambda m, step=step, r=r: loss(m, step, r)] for r in range(size)]
            )
            same_gradients(ddp.module, reference, f"{kind}, step {step}")


@check(2)
def ddp_means_of_large_float16_gradients_are_finite():
    """gloo adds before it divides: 40000 + 40000 is infinite in float16."""
    for kind, make in KINDS.items():
        ddp = make(nn.Linear(3, 2, bias=False).half())
        (ddp(torch.ones(1, 3).half()).float() * 40000).sum().backward()
        ddp.finish_gradient_synchronization()
        assert (ddp.module.weight.grad == 40000).all(), kind


@check(2)
def ddp_refuses_what_would_be_wrong():
    rank, _ = world()
    tokens = checking.token_batches(1)[0]
    for kind in HOOKED:
        ddp = KINDS[kind](Tied())
        loss_on(tokens)(ddp).backward()
        with raises(RuntimeError, "second gradient before finish_gradient_synchronization"):
            loss_on(tokens)(ddp).backward()
        del ddp
        ddp = KINDS[kind](Tied())
        loss_on(tokens)(ddp).backward()
        ddp.finish_gradient_synchronization()
        gradient = ddp.module.head.weight.grad.clone()
        ddp.finish_gradient_synchronization()
        same(ddp.module.head.weight.grad, gradient, "finished twice")
        ddp.zero_grad()
        loss_on(tokens)(ddp).backward()
        ddp.module.head.weight.grad = gradient
        with raises(RuntimeError, "gradient of embed.weight was replaced"):
            ddp.finish_gradient_synchronization()
        with raises(RuntimeError, "a B?u?c?k?e?t?e?d?DDP has parameters of this module"):
            KINDS[kind](ddp.module)
        with raises(TypeError, "take its .module"):
            copy.deepcopy(ddp)
        module = ddp.module
        del ddp  # also one that an error's frames hold in a cycle
        KINDS[kind](module)
    for make in KINDS.values():
        module = Tied()
        ddp = make(module)
        with raises(RuntimeError, "outside of no_sync"), ddp.no_sync():
            ddp.finish_gradient_synchronization()
        module.blocks[1].up.weight.requires_grad_(True)
        with raises(RuntimeError, "blocks.1.up.weight was frozen"):
            ddp.finish_gradient_synchronization()
        shapes = r"rank 0 has weight \(2, 4\) float32 trained, rank 1 weight \(2, 5\)"
        with raises(ValueError, shapes):
            make(nn.Linear(4 + rank, 2))
        with raises(ValueError, r"rank 0 has no more, rank 1 1.weight"):
            make(nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + rank)]))
        with raises(ValueError, "one device and not meta; got meta"):
            make(nn.Linear(2, 2, device="meta"))
        with raises(ValueError, "a parameter is a shard of FSDP, another on each rank"):
            make(FSDP(nn.Linear(4, 4)))
        sparse = nn.Embedding(4, 2, sparse=True)
        ddp = make(sparse)
        with raises(ValueError, "weight has a sparse gradient"):
            ddp(torch.tensor([1])).sum().backward()
            ddp.finish_gradient_synchronization()
    with raises(ValueError, "bucket_size_mb must be above 0; got 0"):
        BucketedDDP(Tied(), 0)


@check(2)
def ddp_buckets_hold_what_they_may_and_start_in_backward():
    rank, _ = world()
    layers = [nn.Linear(8, 8, bias=False) for _ in range(5)]
    ddp = BucketedDDP(nn.Sequential(*layers), bucket_size_mb=2.5 * 256 / 2**20)
    assert ddp._buckets == [[4, 3], [2, 1], [0]]
    sent = []
    layers[0].register_full_backward_pre_hook(lambda *_: sent.append(ddp._step.next))
    for step in range(2):
        ddp(torch.randn(2, 8, requires_grad=True)).sum().backward()
        assert sent[step] == 2, "two buckets are on their way before the first layer's backward"
        ddp.finish_gradient_synchronization()
        assert not ddp._step.sent and not ddp._step.arrived
    single = DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert [len(bucket) for bucket in single._buckets] == [1] * 4


@check(2)
def ddp_updates_each_bucket_as_it_would_afterwards():
    """To the bit: frozen, unused everywhere, unused on one rank, accumulation, four steps."""
    rank, size = world()
    first = Tied()

    def trained(make, overlap):
        ddp, batches, early = make(copy.deepcopy(first)), iter(checking.token_batches(8 * size)), []
        optimizer = MasterAdamW(ddp.parameters(), lr=0.05)
        for step in range(4):
            mine = [next(batches) for _ in range(2 * size)][2 * rank :][:2]
            with ddp.no_sync(), optimizer.overlapping(ddp) if overlap else nullcontext():
                loss_on(mine[0])(ddp).backward()
            before = [p.detach().clone() for p in ddp.parameters()]
            with optimizer.overlapping(ddp) if overlap else nullcontext():
                # A step of every two uses `extra`, on rank 1 alone.
                loss_on(mine[1], extra=step % 2 == 1 and rank == 1)(ddp).backward()
            # The current stream is behind the updates since the context's end.
            after = zip(ddp.parameters(), before, strict=True)
            early.append(sum(not torch.equal(p, was) for p, was in after))
            ddp.finish_gradient_synchronization()
            checking.take_step(optimizer)
        return ddp.module, optimizer.state_dict()["state"], early

    module, state, early = trained(NaiveDDP, False)
    assert early == [0] * 4
    # In the first step all wait for one that is unused; later those unused in it come last.
    used = [p for name, p in first.named_parameters() if not name.startswith(("extra", "never"))]
    count = sum(p.requires_grad for p in used)
    for kind in HOOKED:
        overlapped, its_state, early = trained(KINDS[kind], True)
        same_parameters(overlapped, module, kind)
        assert its_state.keys() == state.keys()
        for i, values in state.items():
            checking.same_by_name(its_state[i], values, f"{kind}, of {i}")
        assert early == [0] + [count] * 3, (kind, early)
    with raises(TypeError, "takes a DDP or BucketedDDP of a2lib.parallel, or nothing; got NaiveDD"):
        with MasterAdamW(module.parameters()).overlapping(NaiveDDP(module)):
            pass


@check(2)
def ddp_takes_its_hooks_with_it():
    module = nn.Linear(2, 2)
    for _ in range(2):
        ddp = DDP(module)
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in module.parameters())
        del ddp
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
