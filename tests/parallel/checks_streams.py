"""What waits for what: the same weights to the bit whichever stream is late; GPUs alone."""

import contextlib
import copy
import functools
import itertools
from unittest.mock import patch

import checking
import torch
from checking import PlainMean, Tied, check, chunks_from, same, token_batches, token_loss, world
from checks_capture import WRAPPERS
from torch.nn import functional as F

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP, BucketedDDP, ShardedOptimizer
from a2lib.parallel.lane import Lane

STEPS = 3
# Some tenths of a millisecond, much more than what a step's kernels take.
CYCLES = 500_000


@contextlib.contextmanager
def late(where, ranks):
    """Have the lane, or the stream that computes, begin or end its work late on these ranks."""
    if world()[0] not in ranks:
        yield
        return
    run = Lane.run

    def slow(lane, work):
        if where == "computing":
            torch.cuda._sleep(CYCLES)
            return run(lane, work)

        def slow_work():
            if where == "lane begins":
                torch.cuda._sleep(CYCLES)
            work()
            if where == "lane ends":
                torch.cuda._sleep(CYCLES)

        return run(lane, slow_work)

    with patch.object(Lane, "run", slow):
        yield


def trained(make, first, updating=False):
    # The fused optimizer does not wait for its steps' counts, which would end what is late.
    rank, size = world()
    wrapper = make(copy.deepcopy(first))
    beside_backward = contextlib.nullcontext
    if updating:
        optimizer = MasterAdamW(wrapper.parameters(), lr=0.05)
        beside_backward = functools.partial(optimizer.overlapping, wrapper)
    else:
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.05, fused=True)
    for tokens in token_batches(STEPS * size)[rank::size]:
        optimizer.zero_grad()
        with beside_backward():
            token_loss(wrapper(tokens), tokens).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        # What is free is written to at once, by other work.
        F.relu(torch.full((1000, 1000), float("nan")))
        [torch.full_like(p, float("nan")) for p in wrapper.parameters()]
    return checking.whole_weights(wrapper)


def the_same_whoever_is_late(kind):
    first, make, updating = Tied(width=64), WRAPPERS[kind], kind.startswith("updating")
    expected = trained(make, first, updating)
    # Where one rank alone is late the other one is ahead.
    for where, ranks in itertools.product(("lane begins", "lane ends", "computing"), ([0, 1], [1])):
        with late(where, ranks):
            weights = trained(make, first, updating)
        checking.same_by_name(weights, expected, f"{where} late on {ranks}")
    checking.same_by_name(trained(make, first, updating), expected, "nobody late")


LATE = (
    "fsdp", "fsdp_bf16", "fsdp_copies", "fsdp_copies_bf16",
    "copy_engines", "copy_engines_bf16", "updating", "updating_copies",
    "updating_fsdp", "updating_fsdp_copies", "updating_fsdp_copies_bf16",
)  # fmt: skip
for kind in LATE:
    function = functools.partial(the_same_whoever_is_late, kind)
    function.__name__, function.__module__ = f"{kind}_waits_where_it_must", __name__
    check(2)(function)


@check(2)
def the_mean_is_that_of_plain_operations():
    """Each is a compilation, so the ranks have every other one."""
    from a2lib.parallel.mean_kernel import MeanKernel

    mine, size = world()
    device = torch.device("cuda", torch.cuda.current_device())
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64
    places = (2, 0), (2, 1), (3, 1), (8, 7)
    for counts in ([10_000, 4096, 160], [10_001, 0, 5]):
        for dtype, (world_size, rank) in list(itertools.product(dtypes, places))[mine::size]:
            tensors, received, layout = checking.parts_of_tensors(counts, world_size, dtype)
            for mean_dtype in dict.fromkeys((dtype, torch.float32)):
                means = []
                for take in (
                    MeanKernel(layout, rank, world_size, device),
                    PlainMean(layout, rank, world_size),
                ):
                    means.append(torch.zeros(20_000, dtype=mean_dtype))
                    take(tensors, received, means[-1])
                same(*means, f"{dtype} to {mean_dtype}, {rank} of {world_size}, {counts}")


@check(2)
def auto_takes_copy_engines_between_gpus():
    for make in (FSDP, functools.partial(BucketedDDP, bucket_size_mb=25)):
        wrapper = make(Tied(), communication="auto")
        assert wrapper.communication == "copy_engines", wrapper.why_backend
        assert wrapper.why_backend is None


@check(2)
def what_the_sharded_optimizer_sends_is_updated():
    """Also where the update of each chunk comes late; by gathers, and by broadcasts too."""
    first = Tied(width=64)

    def trained_by(make):
        module = copy.deepcopy(first)
        optimizer = make(module.parameters(), torch.optim.AdamW)
        for tokens in token_batches(STEPS):  # the same on every rank, and so the gradients
            optimizer.zero_grad()
            token_loss(module(tokens), tokens).backward()
            optimizer.step()
        return module

    def late_update(params, cls, padding_bytes):
        with chunks_from(1000, padding_bytes):
            optimizer = ShardedOptimizer(params, cls, lr=0.05, fused=True)
        step = optimizer._local.step

        def slow():
            torch.cuda._sleep(CYCLES)
            return step()

        optimizer._local.step = slow
        return optimizer

    expected = trained_by(lambda params, cls: cls(params, lr=0.05, fused=True))
    for padding_bytes in (2**20, 0):
        trained = trained_by(functools.partial(late_update, padding_bytes=padding_bytes))
        checking.same_parameters(trained, expected)
