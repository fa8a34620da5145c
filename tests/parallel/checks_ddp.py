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
    losses_of,
    output_sum,
    raises,
    same,
    same_gradients,
    same_parameters,
    world,
)
from torch import nn

from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, FSDP, BucketedDDP, FlatDDP, NaiveDDP

# Those that send during the backward.
HOOKED = {
    "DDP": DDP,
    "BucketedDDP some": functools.partial(BucketedDDP, bucket_size_mb=0.0005),
    "BucketedDDP one": functools.partial(BucketedDDP, bucket_size_mb=100),
    "BucketedDDP some, copied": functools.partial(copied, BucketedDDP, bucket_size_mb=0.0005),
}
KINDS = {"NaiveDDP": NaiveDDP, "FlatDDP": FlatDDP, **HOOKED}


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

    def forward(self, batch):
        y = batch.double() @ self.fp64 @ self.bf16.double() @ self.transposed.double()
        image = self.conv(batch.repeat(2, 6, 1).view(1, 3, 4, -1))
        return (y * self.scalar).sum() + image.square().sum() + self.empty.sum()


@check(2)
def ddp_takes_any_dtype_and_layout():
    rank, size = world()
    first = Odd()
    losses = losses_of(output_sum, torch.randn(size, 5, 3))
    for kind, make in KINDS.items():
        module, reference = checking.moved(first, rank), copy.deepcopy(first)
        ddp = make(module)
        same_parameters(module, reference, kind)
        same(module.flag, reference.flag)
        same(module.count, reference.count)
        checking.backward_of_each(ddp, reference, losses)
        same_gradients(module, reference, kind)
        assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@check(4)
def ddp_is_exact_for_four_where_every_sum_is():
    """A linear function of small whole numbers: no order of the sum rounds."""
    rank, size = world()
    first = checking.exact(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    losses = losses_of(output_sum, torch.randint(-4, 5, (size, 4, 5)).float())
    for kind, make in KINDS.items():
        ddp, reference = make(checking.moved(first, rank)), copy.deepcopy(first)
        checking.backward_of_each(ddp, reference, losses)
        same_gradients(ddp.module, reference, kind)


@check(2)
def ddp_ranks_may_make_gradients_in_different_orders():
    """Each rank uses two equal layers in its own order, and one of them later not at all: pairing
    by arrival would mix them without an error."""
    _, size = world()
    first = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    batches = torch.randn(size, 3, 4)

    def loss_of_rank(module, rank, step):
        x = batches[rank]
        order = (0, 1) if (rank + step) % 2 else (1, 0)
        for i in order:
            if step < 2 or i == rank:
                x = module[i](x).tanh()
        return x.sum()

    for kind, make in KINDS.items():
        ddp, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        # The layers are called past the wrapper's forward.
        for step in range(4):
            ddp.zero_grad()
            loss_of_rank(ddp.module, ddp.rank, step).backward()
            ddp.finish_gradient_synchronization()
            losses = []
            for rank in range(size):
                losses.append([functools.partial(loss_of_rank, rank=rank, step=step)])
            checking.mean_gradients(reference, losses)
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
def ddp_refuses_what_would_be_wrong_of_a_step():
    loss = loss_on(checking.token_batches(1)[0])
    for make in HOOKED.values():
        ddp = make(Tied())
        loss(ddp).backward()
        with raises(RuntimeError, "second gradient before finish_gradient_synchronization"):
            loss(ddp).backward()
        ddp = make(Tied())
        loss(ddp).backward()
        ddp.finish_gradient_synchronization()
        gradient = ddp.module.head.weight.grad.clone()
        ddp.finish_gradient_synchronization()
        same(ddp.module.head.weight.grad, gradient, "finished twice")
        ddp.zero_grad()
        loss(ddp).backward()
        ddp.module.head.weight.grad = gradient
        with raises(RuntimeError, "gradient of embed.weight was replaced"):
            ddp.finish_gradient_synchronization()
    for make in KINDS.values():
        ddp = make(Tied())
        with raises(RuntimeError, "outside of no_sync"), ddp.no_sync():
            ddp.finish_gradient_synchronization()
        ddp.module.blocks[1].up.weight.requires_grad_(True)
        with raises(RuntimeError, "blocks.1.up.weight was frozen"):
            ddp.finish_gradient_synchronization()
        ddp = make(nn.Embedding(4, 2, sparse=True))
        with raises(ValueError, "weight has a sparse gradient"):
            ddp(torch.tensor([1])).sum().backward()
            ddp.finish_gradient_synchronization()


@check(2)
def ddp_refuses_modules_that_it_cannot_wrap():
    rank, _ = world()
    with raises(ValueError, r"rank 0 has weight \(2, 4\) float32 trained, rank 1 weight \(2, 5\)"):
        DDP(nn.Linear(4 + rank, 2))
    more = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    with raises(ValueError, r"rank 0 has no more, rank 1 1.weight"):
        DDP(nn.Sequential(*more[: 1 + rank]))
    with raises(ValueError, "one device and not meta; got meta"):
        DDP(nn.Linear(2, 2, device="meta"))
    with raises(ValueError, "a parameter is a shard of FSDP, another on each rank"):
        DDP(FSDP(nn.Linear(4, 4)))
    with raises(ValueError, "bucket_size_mb must be above 0; got 0"):
        BucketedDDP(Tied(), 0)
    with raises(TypeError, "take its .module"):
        copy.deepcopy(DDP(Tied()))


@check(2)
def ddp_buckets_hold_what_they_may_and_leave_during_the_backward():
    layers = [nn.Linear(8, 8, bias=False) for _ in range(5)]
    module = nn.Sequential(*layers)
    names = {p: name for name, p in module.named_parameters()}
    ddp = BucketedDDP(module, bucket_size_mb=2.5 * 256 / 2**20)
    events = []

    def note(parameters):
        events.append([names[p] for p in parameters])

    layers[0].register_full_backward_pre_hook(lambda *_: events.append("the first layer's"))
    for _ in range(2):
        events.clear()
        with ddp.each_mean(note):
            ddp(torch.randn(2, 8, requires_grad=True)).sum().backward()
        ddp.finish_gradient_synchronization()
        assert events == [
            ["4.weight", "3.weight"], ["2.weight", "1.weight"], "the first layer's", ["0.weight"]
        ]  # fmt: skip


def trained_with_updates(make, overlap):
    """Train four steps of two backwards each. Return the module, its optimizer's state, and how
    many parameters each step's last backward has changed."""
    rank, size = world()
    torch.manual_seed(0)
    ddp = make(Tied())
    optimizer = MasterAdamW(ddp.parameters(), lr=0.05)
    batches = checking.token_batches(8 * size)
    changed = []
    for step in range(4):
        begin = 2 * (size * step + rank)
        first, last = batches[begin : begin + 2]
        with ddp.no_sync(), optimizer.overlapping(ddp) if overlap else nullcontext():
            loss_on(first)(ddp).backward()
        before = checking.copies_of(ddp.parameters())
        with optimizer.overlapping(ddp) if overlap else nullcontext():
            # A step of every two uses `extra`, on rank 1 alone.
            loss_on(last, extra=step % 2 == 1 and rank == 1)(ddp).backward()
        # The current stream is behind the updates since the context's end.
        count = 0
        for p, was in zip(ddp.parameters(), before, strict=True):
            count += not torch.equal(p, was)
        changed.append(count)
        ddp.finish_gradient_synchronization()
        checking.take_step(optimizer)
    return ddp.module, optimizer.state_dict()["state"], changed


@check(2)
def ddp_updates_each_bucket_as_it_would_afterwards():
    """To the bit: frozen, unused everywhere, unused on one rank, accumulation, four steps."""
    module, state, changed = trained_with_updates(NaiveDDP, overlap=False)
    assert changed == [0] * 4
    # In the first step all wait for one that is unused; later those unused in it come last.
    used = 0
    for name, p in module.named_parameters():
        used += p.requires_grad and not name.startswith(("extra", "never"))
    for kind, make in HOOKED.items():
        overlapped, its_state, changed = trained_with_updates(make, overlap=True)
        same_parameters(overlapped, module, kind)
        assert its_state.keys() == state.keys()
        for i, values in state.items():
            checking.same_by_name(its_state[i], values, f"{kind}, of {i}")
        assert changed == [0, used, used, used], (kind, changed)
    with raises(
        TypeError, "a DDP, BucketedDDP or FSDP of a2lib.parallel, or nothing; got NaiveDDP"
    ):
        with MasterAdamW(module.parameters()).overlapping(NaiveDDP(module)):
            pass
