"""Steps in a CUDA graph against the same steps launched one by one; GPUs alone."""

import contextlib
import functools

import checking
import torch
from checking import Tied, check, chunks_from, same, seeded, token_loss, world

from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, FSDP, BucketedDDP, FlatDDP, NaiveDDP, ShardedOptimizer, capture_step
from a2lib.parallel.graphs import WARMUP

STEPS, WORDS = 7, 11
ENGINES = {"communication": "copy_engines"}
LOW = {"communication_dtype": torch.bfloat16}
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": DDP,
    "bucketed": functools.partial(BucketedDDP, bucket_size_mb=0.01),
    "one_bucket": functools.partial(BucketedDDP, bucket_size_mb=100),
    "bucketed_bf16": functools.partial(BucketedDDP, bucket_size_mb=0.01, **LOW),
    "copy_engines": functools.partial(BucketedDDP, bucket_size_mb=0.01, **ENGINES),
    "copy_engines_bf16": functools.partial(BucketedDDP, bucket_size_mb=0.01, **ENGINES, **LOW),
    "updating": functools.partial(BucketedDDP, bucket_size_mb=0.01),
    "updating_copies": functools.partial(BucketedDDP, bucket_size_mb=0.01, **ENGINES, **LOW),
    "sharded_optimizer": DDP,
    "fsdp": FSDP,
    "fsdp_bf16": functools.partial(FSDP, compute_dtype=torch.bfloat16),
    "fsdp_copies": functools.partial(FSDP, **ENGINES),
    "updating_fsdp": FSDP,
    "updating_fsdp_copies": functools.partial(FSDP, **ENGINES),
    "updating_fsdp_copies_bf16": functools.partial(FSDP, compute_dtype=torch.bfloat16, **ENGINES),
    "fsdp_copies_bf16": functools.partial(FSDP, compute_dtype=torch.bfloat16, **ENGINES),
}


class Training:
    """A wrapped model, frozen and unused parameters in it, that takes its batches by itself."""

    def __init__(self, kind, steps=STEPS):
        rank, size = world()
        torch.manual_seed(0)
        self.module = Tied(width=32)
        self.wrapper = WRAPPERS[kind](self.module)
        self.beside_backward = contextlib.nullcontext
        options = {"lr": 0.01, "capturable": True}
        if kind == "sharded_optimizer":
            with chunks_from(1000, padding_bytes=0):  # gathers and broadcasts
                self.optimizer = ShardedOptimizer(
                    self.module.parameters(), torch.optim.AdamW, **options
                )
        elif kind.startswith("updating"):
            self.optimizer = MasterAdamW(self.module.parameters(), lr=0.01)
            self.beside_backward = functools.partial(self.optimizer.overlapping, self.wrapper)
        else:
            self.optimizer = torch.optim.AdamW(
                self.module.parameters(), fused=kind == "overlapped", **options
            )
        shape = (steps, size, 4, 8)
        self.batches = torch.randint(WORDS, shape, generator=seeded(1))[:, rank].contiguous()
        self.taken = torch.zeros(1, dtype=torch.long)
        self.losses = []

    def step(self, **options):
        self.optimizer.zero_grad()
        tokens = self.batches.index_select(0, self.taken)[0]
        self.taken.add_(1)
        loss = token_loss(self.wrapper(tokens, **options), tokens)
        with self.beside_backward():
            loss.backward()
        self.wrapper.finish_gradient_synchronization()
        self.optimizer.step()
        self.losses.append(loss.detach().clone())
        return loss


def launched(kind, steps=STEPS):
    """On a stream of its own too, so that the kernels are the same."""
    training = Training(kind, steps)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            training.step()
    stream.synchronize()
    return training


def captured_as_launched(kind, steps=STEPS):
    plain, training = launched(kind, steps), Training(kind, steps)
    with capture_step(training.step) as captured:
        losses = [*training.losses[:WARMUP], captured.output.clone()]
        assert len(losses) == WARMUP + 1
        for _ in range(len(losses), steps):
            losses.append(captured.replay().clone())
        assert training.taken.item() == steps
        for n, (mine, theirs) in enumerate(zip(losses, plain.losses, strict=True)):
            same(mine, theirs, f"{kind}, loss of step {n}")
        same_weights(training, plain, kind)


def same_weights(training, plain, what):
    mine, theirs = (checking.whole_weights(t.wrapper) for t in (training, plain))
    checking.same_by_name(mine, theirs, what)


CHECKED = {
    **{f"captured_{kind}": (captured_as_launched, kind) for kind in WRAPPERS},
    "captured_copies_for_many_steps": (captured_as_launched, "copy_engines", 50),
    "captured_fsdp_copies_for_many_steps": (captured_as_launched, "fsdp_copies_bf16", 50),
}
for name, (function, *given) in CHECKED.items():
    function = functools.partial(function, *given)
    function.__name__, function.__module__ = name, __name__
    check(2)(function)
