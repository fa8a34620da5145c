"""A training step that every rank takes on a batch of its own: made, checked and timed.

    with on_stream(device):
        training = Training(StepConfig.of(key), device)
        means = training.mean_gradients()            # over the ranks, nothing wrapped yet
        with training.wrapped(BucketedDDP(training.model, 25)):
            training.error(means)                    # of the gradients that the wrapper leaves
            times = time_steps({"sent": training}, device)
            times["sent"].slowest.ms                 # of each step the slowest rank, the median

With a learning rate of 0 the weights stay what they are, at the work of any other step: all
wrappers average the same gradients. Everything is on one stream that is not the default one, since
a step may be captured there. Every rank calls each of these.
"""

import contextlib
import dataclasses
import gc
import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

from a2lib.errors import UnsupportedError
from a2lib.lab.device import synchronize
from a2lib.lab.steps import Phase, StepConfig, TrainingStep
from a2lib.lab.timing import Mark, RankTimes, in_turns, meet

# Atomic additions of a backward change last bits; a mean that is none is wrong by its own size.
TOLERANCE = 0.01
WARMUP = 4
# Steps that are timed, the fewest where one is long: it varies little then.
STEPS, FEWEST = 20, 10
LONG_MS = 300.0
# What a wrapper has that waits for its messages after backward; PyTorch's waits in backward.
FINISH = "finish_gradient_synchronization"


def on_stream(device: str) -> AbstractContextManager:
    """Return the context in which a training is made and run whose step may be captured."""
    if device != "cuda":
        return nullcontext()
    from a2lib.parallel.graphs import CudaGraphs

    return CudaGraphs().on_stream()


class Training(TrainingStep):
    """The step of one rank: the model, AdamW that changes nothing, and a batch of its own."""

    def __init__(self, config: StepConfig, device: str, seed: int = 0) -> None:
        import torch
        import torch.distributed as dist

        # Captured or not, the optimizer counts its steps on the GPU.
        super().__init__(dataclasses.replace(config, capture=device == "cuda"), device, seed)
        stand_still(self.optimizer)
        generator = torch.Generator(device).manual_seed(seed + 1 + dist.get_rank())
        for tokens in (self.tokens, self.targets):
            tokens.random_(0, config.shape.vocab_size, generator=generator)
        self.wrapper = None

    def __call__(
        self,
        phase: Phase = nullcontext,
        *,
        send: bool = True,
        before_optimizer: Callable[[], object] | None = None,
    ):
        """Take one step and return its loss; without `send` gradients stay this rank's own.

        `before_optimizer` is called behind backward, and behind the finish where that is due.
        """
        is_quiet = self.wrapper is not None and not send
        quiet = self.wrapper.no_sync if is_quiet else nullcontext
        with quiet():
            output = self.forward_and_backward(phase)
        if self.finishes and send:
            with phase("communication"):
                self.finish()
        if before_optimizer is not None:
            before_optimizer()
        with quiet():  # where a step is this rank's own
            self.update(phase)
        return output.detach()

    @property
    def finishes(self) -> bool:
        """Return whether the wrapper has to be asked to finish."""
        return hasattr(self.wrapper, FINISH)

    def finish(self) -> None:
        """Wait for the gradients that travel."""
        getattr(self.wrapper, FINISH)()

    def warm(self, send: bool = True) -> None:
        """Take steps that are not timed: they compile, allocate and agree on an order."""
        for _ in range(WARMUP):
            self(send=send)

    @contextlib.contextmanager
    def wrapped(self, wrapper) -> Iterator[None]:
        """Have steps in this context go through `wrapper`, a wrapper of the model."""
        self.wrapper = self.forward = wrapper
        del wrapper  # or the collection would come too early for it
        try:
            yield
        finally:
            self.wrapper, self.forward = None, self.model
            self.drop_gradients()
            gc.collect()

    def looked_at(self) -> list:
        """Return the parameters that checks look at: of those whose names differ in numbers alone,
        the first and the last."""
        kinds: dict[str, list] = {}
        for name, p in self.model.named_parameters():
            kinds.setdefault(re.sub(r"\d+", "", name), []).append(p)
        ends: list = []
        for same in kinds.values():
            ends += [same[0], same[-1]]
        return list(dict.fromkeys(ends))

    def checked_gradients(self, send: bool) -> list:
        """Return what a step makes of the gradients of `looked_at`."""
        gradients: list = []

        def copy() -> None:
            gradients.extend(p.grad.clone() for p in self.looked_at())

        self(send=send, before_optimizer=copy)
        return gradients

    def mean_gradients(self) -> list:
        """Return the means over the ranks of the gradients that are looked at."""
        import torch.distributed as dist

        gradients = self.checked_gradients(send=False)
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradients

    def error(self, means: list) -> float:
        """Return how far gradients are from `means` after a step, relative to their size: the
        largest difference on any rank; not above `TOLERANCE` where they are right."""
        import torch

        from a2lib.parallel.group import everyone

        differences = []
        for gradient, mean in zip(self.checked_gradients(send=True), means, strict=True):
            differences.append((gradient - mean).norm() / mean.norm().clamp(min=1e-30))
        largest = torch.stack(differences).nan_to_num(nan=torch.inf).max().item()
        return max(everyone(largest))


def stand_still(optimizer):
    """Give `optimizer` a learning rate of 0, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def fully_sharded(model, low, device: str, group=None) -> None:
    """Shard `model` by PyTorch's FSDP2 in the units that ours has, freed where ours are: blocks
    after their forward but for the last, the rest after backward. `low` is the dtype that it
    computes in, None its own; `group` has all ranks. Collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group or dist.group.WORLD, device)
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in model.layers:
        again = block is not model.layers[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def state_bytes(optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds of parameters, gradients and AdamW's state, as columns
    of a row. The parameters are the optimizer's: a sharded module's are whole while it computes."""
    from a2lib.parallel.group import local

    held = {"parameter_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    for group in optimizer.param_groups:
        for p in group["params"]:
            held["parameter_bytes"] += local(p).nbytes
            if p.grad is not None:
                held["gradient_bytes"] += local(p.grad).nbytes
    inner = getattr(optimizer, "optim", optimizer)  # PyTorch's that shards has one within
    for values in inner.state.values():
        if "exp_avg" not in values:  # an entry that was asked for, and never filled
            continue
        for value in values.values():
            if hasattr(value, "nbytes"):
                held["optimizer_bytes"] += local(value).nbytes
    return held


def marking(name: str, device: str, marks: list[Mark]) -> Phase:
    """Return a phase that appends to `marks` where the phase `name` begins and where it ends."""

    @contextlib.contextmanager
    def phase(part: str) -> Iterator[None]:
        if part == name:
            marks.append(Mark(device))
        yield
        if part == name:
            marks.append(Mark(device))

    return phase


def replayed(step: Callable, capture: bool, held: ExitStack) -> Callable:
    """Return the step, or if `capture` its replay from a CUDA graph, as long as `held` is open.

    A capture that fails raises UnsupportedError, or what it raised if that was out of memory.
    """
    import torch

    from a2lib.parallel import capture_step

    if not capture:
        return step
    try:
        return held.enter_context(capture_step(step)).replay
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(f"no CUDA graph of this step: {error}") from error


def time_steps(steps: Mapping[str, Callable], device: str) -> dict[str, RankTimes]:
    """Time each of `steps`, in turns whose order changes, and return what every rank took.

    A step's time is from its begin to the next one's, several of them in a row.
    """
    from a2lib.parallel.group import everyone

    longest = 0.0
    for step in steps.values():
        times, _ = _in_a_row(step, device, 1)
        longest = max(longest, *times)
    count = STEPS if max(everyone(longest)) < LONG_MS else FEWEST
    taken, issued = defaultdict(list), defaultdict(list)
    for name, several in in_turns(dict.fromkeys(steps, count)):
        times, host = _in_a_row(steps[name], device, several)
        taken[name] += times
        issued[name].append(host)
    every = {}
    for name in steps:
        host = max(everyone(statistics.median(issued[name]))) if device == "cuda" else None
        every[name] = RankTimes(everyone(taken[name]), host)
    return every


def _in_a_row(step: Callable, device: str, count: int) -> tuple[list[float], float]:
    """Return the milliseconds of each of `count` steps behind a first one, which all ranks begin
    from rest, and what the host took to issue that first one."""
    meet(device)
    start = time.perf_counter_ns()
    step()
    issued = (time.perf_counter_ns() - start) / 1e6
    marks = [Mark(device)]
    for _ in range(count):
        step()
        marks.append(Mark(device))
    synchronize(device)
    return [a.ms_until(b) for a, b in itertools.pairwise(marks)], issued
