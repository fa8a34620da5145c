"""Copy engines: their steps on memory that processes share, and which communication is taken."""

import functools
import random
from unittest.mock import patch

import checking
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from checking import (
    Tied,
    alone,
    check,
    copied,
    loss_on,
    raises,
    same,
    seeded,
    token_batches,
    world,
)
from torch import nn

from a2lib.parallel import FSDP, BucketedDDP, copy_engines, mean_kernel
from a2lib.parallel.lane import Lane


class Given(nn.Module):
    """Parameters whose gradients are what it is called with: of any dtype, order and size, and of
    both kinds, those that are read where backward leaves them and those that are not."""

    def __init__(self):
        super().__init__()
        shapes = [(), (7,), (64, 33), (96, 128), (0, 3), (5, 4), (32, 1), (256,), (3, 3, 32, 2)]
        self.weights = nn.ParameterList(map(torch.ones, shapes))
        self.weights.append(torch.ones(32, 64).t())
        self.weights.append(torch.ones(48, dtype=torch.float64))
        for n in (5, 128, 1000):
            self.weights.append(torch.ones(n, dtype=torch.bfloat16))

    def forward(self, given):
        total = 0
        for i, gradient in given.items():
            total = total + (self.weights[i] * gradient).sum().double()
        return total


@check(2, 4)
def buckets_take_random_steps():
    """Against one process that rounds what is sent, adds in rank order in float32 and rounds the
    mean: gradients dropped, zeroed or kept between steps, summed over two backwards, missing on
    some ranks or on all, and steps that failed half way. With two ranks a backend does the same."""
    _, size = world()
    for sent, bucket_mb in ((None, 0.02), (torch.bfloat16, 1e-6), (torch.float16, 100)):
        random_steps(functools.partial(copied, BucketedDDP), sent, bucket_mb)
    if size == 2:
        # Not in float16: NCCL halves before it adds, of its smallest numbers a rounding more.
        random_steps(BucketedDDP, torch.bfloat16, 0.02)


@check(2)
def copy_engines_may_be_as_late_as_the_finish():
    """As if their stream had begun nothing before: no gradient is gone or another one by then."""
    queued = []

    def everything(_):
        while queued:
            queued.pop(0)()

    begun = patch.object(Lane, "run", lambda _, work: queued.append(work))
    with begun, patch.object(Lane, "wait", staticmethod(everything)):
        for sent in (None, torch.bfloat16):
            random_steps(functools.partial(copied, BucketedDDP), sent, 0.02)


def random_steps(make, sent, bucket_mb):
    rank, size = world()
    draw = random.Random(0)
    ddp = make(Given(), bucket_mb, communication_dtype=sent)
    weights = list(ddp.module.weights)
    means = [None] * len(weights)
    for step in range(8):
        used = [i for i in range(len(weights)) if draw.random() < 0.8] or [0]
        given = random_gradients(draw, weights, used, size)
        *early, last = given[rank]
        with ddp.no_sync():
            for gradients in early:
                ddp(gradients).backward()
        ddp(last).backward()
        ddp.finish_gradient_synchronization()
        for i, p in enumerate(weights):
            what = f"{sent}, {bucket_mb} MB, step {step}, parameter {i}"
            means[i] = mean_of(i, p, given, means[i], sent)
            assert (p.grad is None) == (means[i] is None), what
            if means[i] is not None:
                same(p.grad, means[i], what)
                assert p.grad.stride() == p.stride(), what
        between = draw.choice(("dropped", "zeroed", "kept"))
        if between == "dropped":
            ddp.zero_grad()
            means = [None] * len(weights)
        elif between == "zeroed":
            ddp.zero_grad(set_to_none=False)
            for mean in means:
                if mean is not None:
                    mean.zero_()


def random_gradients(draw, weights, used, size):
    """Return, for each rank, what one or two backwards are given: most of those ``used``."""
    given = []
    for _ in range(size):
        of_rank = []
        for _ in range(draw.choice((1, 2))):
            mine = [i for i in used if draw.random() < 0.9] or used
            generator = seeded(draw.randrange(10**6))
            gradients = {}
            for i in mine:
                random_one = torch.randn(weights[i].shape, generator=generator)
                gradients[i] = random_one.to(weights[i].dtype)
            of_rank.append(gradients)
        given.append(of_rank)
    return given


def mean_of(i, p, given, before, sent):
    """Return the mean gradient of parameter ``i``, which was ``before`` on every rank."""
    dtype = sent if sent and p.is_floating_point() else p.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total, nobody_has_one = 0, True
    for of_rank in given:
        mine = before
        for gradients in of_rank:
            if i in gradients:
                mine = gradients[i] if mine is None else mine + gradients[i]
        if mine is not None:
            nobody_has_one = False
            total = total + mine.detach().to(dtype).to(wide)
    if nobody_has_one:
        return None
    return (total / torch.full((), len(given), dtype=wide)).to(dtype).to(p.dtype)


@check(2)
def a_unit_is_one_message_however_many_matrices_it_has():
    """Two barriers for each gather and each reduction, and one kernel for the means of all of its
    gradients: each more would cost the host time."""
    fsdp = copied(FSDP, Tied())
    told, barriers, means = [], [], []
    shared, mean = copy_engines.SharedMemory, mean_kernel.MeanKernel

    def meet(memory, call=shared.barrier):
        barriers.append(memory)
        call(memory)

    def take(kernel, *args, call=mean.__call__):
        means.append(kernel)
        call(kernel, *args)

    with patch.object(shared, "barrier", meet), patch.object(mean, "__call__", take):
        for _ in range(2):  # the second one as the first
            fsdp.observe(lambda moment, unit: told.append(moment))
            loss_on(token_batches(1)[0])(fsdp).backward()
            fsdp.finish_gradient_synchronization()
            fsdp.zero_grad()
            gathers, reductions = told.count("gather ends"), told.count("reduce ends")
            assert gathers == 6 and reductions == 4, told
            assert len(barriers) == 2 * (gathers + reductions) and len(means) == reductions
            for counts in (told, barriers, means):
                counts.clear()


@check(2)
def which_communication_is_taken_is_told():
    reason = "there is one rank" if checking.on_gpus() else "on cpu, not on GPUs"
    own = alone()
    for make in (FSDP, functools.partial(BucketedDDP, bucket_size_mb=25)):
        module = Tied()
        shape = module.head.weight.shape
        words = r"must be one of \('backend', 'copy_engines', 'auto'\); got 'nccl'"
        with raises(ValueError, words):
            make(module, communication="nccl")
        with raises(ValueError, f"copy engines cannot .*{reason}; 'backend' or 'auto' can"):
            make(module, group=own, communication="copy_engines")
        assert module.head.weight.shape == shape  # as it was
        assert make(Tied()).communication == "backend"
        wrapper = make(module, group=own, communication="auto")
        assert wrapper.communication == "backend" and reason in wrapper.why_backend
    with raises(ValueError, "communication_dtype must be a floating dtype or None; got torch.int8"):
        BucketedDDP(Tied(), 25, communication_dtype=torch.int8)


@check(2)
def memory_that_comes_again_is_what_the_other_rank_has_again():
    """Blocks that were given back come again in another order on each rank."""
    rank, _ = world()
    blocks = [torch.empty(8, dtype=torch.uint8) for _ in range(3)]
    coming = []
    made = {"empty": lambda *_, **__: coming.pop(0), "rendezvous": lambda mine, _: mine.data_ptr()}
    with patch.object(copy_engines, "_met", {}), patch.multiple(symmetric_memory, **made):
        third = [1, 0, 2] if rank else [0, 1, 2]
        for mine, wanted in (([0], 0), ([1], 1), (third, 2), ([0], 0), ([2], 2)):
            coming += [blocks[i] for i in mine]
            memory, handle = copy_engines.shared_memory(8, None, torch.device("cpu"))
            assert memory is blocks[wanted] and handle == memory.data_ptr() and not coming
