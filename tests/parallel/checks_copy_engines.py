"""Copy engines: their steps on memory that processes share, and which communication is taken."""

import copy

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from checking import (
    Tied,
    check,
    mean_gradients,
    raises,
    same,
    same_gradients,
    token_batches,
    token_loss,
    world,
)
from checks_ddp import copied, loss_on

from a2lib.parallel import BucketedDDP, copy_engines


@check(2, 4)
def copy_engines_add_in_rank_order_to_the_bit():
    """Also for four, which backends do not; gradients that are kept, zeroed or dropped between
    steps, and accumulated in between."""
    rank, size = world()
    for between in ("kept", "zeroed", "dropped"):
        ddp, reference = copied(Tied(), 0.0005), Tied()
        reference.load_state_dict(ddp.module.state_dict())
        batches = iter(token_batches(3 * 2 * size))
        for step in range(3):
            losses = [[loss_on(next(batches)) for _ in range(2)] for _ in range(size)]
            kept = {n: p.grad.clone() for n, p in ddp.module.named_parameters() if _given(p)}
            with ddp.no_sync():
                losses[rank][0](ddp).backward()
            losses[rank][1](ddp).backward()
            ddp.finish_gradient_synchronization()
            if between == "kept":
                add_to_each(reference, losses, kept)
            else:
                mean_gradients(reference, losses)
            same_gradients(ddp.module, reference, f"{between}, step {step}")
            if between != "kept":
                ddp.zero_grad(set_to_none=between == "dropped")


def _given(p):
    return p.grad is not None


def add_to_each(reference, losses, kept):
    """As mean_gradients, each rank's beginning from ``kept``."""
    parts = []
    for own in losses:
        reference.zero_grad()
        for name, p in reference.named_parameters():
            p.grad = kept[name].clone() if name in kept else None
        for loss in own:
            loss(reference).backward()
        parts.append([p.grad for p in reference.parameters()])
        for p in reference.parameters():
            p.grad = None
    for p, grads in zip(reference.parameters(), zip(*parts, strict=True), strict=True):
        if grads[0] is not None:
            total = grads[0]
            for g in grads[1:]:
                total = total + g
            p.grad = total / len(losses)


@check(2, 4)
def gradients_travel_in_sixteen_bits():
    """Each rank's rounded, added in float32 by copy engines, rounded again; float32 in .grad. A
    backend of two ranks does the same."""
    rank, size = world()
    first = Tied()

    def loss(tokens):
        # NCCL halves before it adds: of float16's smallest numbers that would be a rounding more.
        return lambda module: 2**10 * token_loss(module(tokens), tokens)

    batches = token_batches(2 * size)
    for dtype in (torch.bfloat16, torch.float16):
        kinds = {"copied": lambda m, d=dtype: copied(m, 0.0005, communication_dtype=d)}
        if size == 2:
            kinds["backend"] = lambda m, d=dtype: BucketedDDP(m, 0.0005, communication_dtype=d)
        for kind, make in kinds.items():
            ddp = make(copy.deepcopy(first))
            for step in range(2):
                own = batches[step * size : (step + 1) * size]
                ddp.zero_grad()
                loss(own[rank])(ddp).backward()
                before = {n: p.grad for n, p in ddp.module.named_parameters() if _given(p)}
                ddp.finish_gradient_synchronization()
                rounded = []
                for tokens in own:
                    reference = copy.deepcopy(first)
                    loss(tokens)(reference).backward()
                    rounded.append(
                        {
                            n: p.grad.to(dtype).float()
                            for n, p in reference.named_parameters()
                            if _given(p)
                        }
                    )
                for name, p in ddp.module.named_parameters():
                    if name not in rounded[0]:
                        assert p.grad is None, name
                        continue
                    total = rounded[0][name]
                    for one in rounded[1:]:
                        total = total + one[name]
                    mean = (total / size).to(dtype).float()
                    same(p.grad, mean, f"{kind}, {dtype}, {name}, step {step}")
                    assert p.grad is before[name]


@check(2)
def which_communication_is_taken_is_told():
    rank, size = world()
    with raises(ValueError, r"must be one of \('backend', 'copy_engines', 'auto'\); got 'nccl'"):
        BucketedDDP(Tied(), 25, communication="nccl")
    with raises(ValueError, "communication_dtype must be a floating dtype or None; got torch.int8"):
        BucketedDDP(Tied(), 25, communication_dtype=torch.int8)
    assert BucketedDDP(Tied(), 25).communication == "backend"
    alone = [dist.new_group([r]) for r in range(size)][rank]
    reason = "there is one rank" if dist.get_backend() == "nccl" else "on cpu, not on GPUs"
    with raises(ValueError, f"copy engines cannot .*{reason}; 'backend' or 'auto' can"):
        BucketedDDP(Tied(), 25, alone, communication="copy_engines")
    ddp = BucketedDDP(Tied(), 25, alone, communication="auto")
    assert ddp.communication == "backend" and reason in ddp.why_backend
    assert f"communication=backend ({ddp.why_backend})" in repr(ddp)


@check(2)
def memory_that_comes_again_is_what_the_other_rank_has_again():
    """Blocks that were given back come again in another order on each rank."""
    rank, _ = world()
    blocks = [torch.empty(8, dtype=torch.uint8) for _ in range(3)]
    before = symmetric_memory.empty, symmetric_memory.rendezvous, copy_engines._met
    copy_engines._met = {}
    symmetric_memory.rendezvous = lambda mine, group: mine.data_ptr()
    try:
        for mine, wanted in (
            ([0], 0),
            ([1], 1),
            ([1, 0, 2] if rank else [0, 1, 2], 2),
            ([0], 0),
            ([2], 2),
        ):
            coming = [blocks[i] for i in mine]
            symmetric_memory.empty = lambda *_, coming=coming, **__: coming.pop(0)
            memory, handle = copy_engines.shared_memory(8, None, torch.device("cpu"))
            assert memory is blocks[wanted] and handle == memory.data_ptr() and not coming
    finally:
        symmetric_memory.empty, symmetric_memory.rendezvous, copy_engines._met = before
