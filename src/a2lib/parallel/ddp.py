"""Distributed data parallel, from the obvious to the overlapped.

Every rank holds the whole module and works on its own part of the batch; after backward each
gradient becomes the mean over the ranks, so that all take the same step. What differs is when and
in what pieces the gradients travel:

    NaiveDDP      after backward, one all-reduce a parameter
    FlatDDP       after backward, one all-reduce of all gradients copied into one tensor
    DDP           during backward, each gradient as soon as it is there
    BucketedDDP   during backward, as soon as the gradients of a bucket are there; by NCCL or gloo,
                  or by copy engines (``copy_engines``), in the gradients' dtype or in another

Overlap and buckets are those of Li et al., VLDB 2020 (arXiv 2006.15704, section 3.2), but for a
copy: gradients travel from where backward left them. The classes have one interface:

    ddp = DDP(module)
    with ddp.no_sync():                        # gradients accumulate and stay here
        loss(ddp(x0), y0).backward()
    loss(ddp(x1), y1).backward()
    ddp.finish_gradient_synchronization()      # now .grad is the mean over the ranks
    optimizer.step()

An update of each bucket as soon as it is the mean, beside the rest of the communication, is
``a2lib.optim.MasterAdamW.overlapping(ddp)``.

Clipping, norms and loss scaling come after ``finish_gradient_synchronization``. An optimizer's step
without it raises RuntimeError (``agreement``).

To the bit: with two ranks each mean is (a + b) / 2 however it is cut into pieces, so all four
classes, every bucket size and one process that adds the two ranks' gradients agree exactly. With
more ranks the order of the sum is the backend's and depends on the size of the pieces, so that the
classes differ from one another in the last bits. So does a single pass over the whole batch, at any
number of ranks, because a matrix product over more rows sums in another grouping.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from a2lib.parallel.agreement import Agreement, Members, wrappers
from a2lib.parallel.copy_engines import CopyEngines, Then, choose
from a2lib.parallel.group import Mean, capturing, make_alike, mean_operator, member, one_device
from a2lib.parallel.lane import Lane
from a2lib.parallel.tensors import group_by

MB = 2**20


@dataclass(slots=True)
class _Step:
    """Counts and tensors since the last finish. They are not attributes of the wrapper, which is a
    module: to set one of those costs the host as much as a message."""

    forwards: int = 0  # of the wrapper, whose backward is to be averaged
    accumulated: bool = False  # a backward has added to a gradient
    is_due: bool = False  # one outside of no_sync, and so its mean may be on its way
    waits_for: list[int] = field(default_factory=list)  # gradients that each bucket has not yet
    next: int = 0  # the bucket to send
    arrived: dict[int, None] = field(default_factory=dict)  # parameters, in order
    # The gradient that each parameter of what was sent has to have still.
    sent: list[tuple[int, Tensor]] = field(default_factory=list)


class _Replica(nn.Module):
    """Hold what the four classes share; ``NaiveDDP`` says what it promises."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.rank, self.world_size = member(group)
        self.device = make_alike(module, group)
        self.module, self.group = module, group
        self._trained: list[nn.Parameter] = []
        self._names: list[str] = []
        for name, p in module.named_parameters():
            if p.requires_grad:
                self._names.append(name)
                self._trained.append(p)
        self._members = Members(module)
        self._synchronizing = True
        self._step = _Step()
        self._agreement = Agreement(self._names, self.device, group)
        me = weakref.ref(self)
        hooks = []
        for i, p in enumerate(self._trained):
            hooks.append(p.register_post_accumulate_grad_hook(_hook(me, i)))
        # Each would cost a call in every later backward.
        weakref.finalize(self, _remove, hooks).atexit = False
        wrappers.add(self)

    def forward(self, *args, **kwargs):
        if self._counts_forwards():
            self._step.forwards += 1
        return self.module(*args, **kwargs)

    def _counts_forwards(self) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return self._synchronizing and not capturing(self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them, in the backwards within this context.

        The next backward outside averages the sum. So does the finish, without another backward. An
        optimizer's step within it goes by this rank's own gradients; it raises RuntimeError where a
        backward outside has begun to average them. May be nested.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Make each ``.grad`` the mean over the ranks; every rank calls it once a step.

        Work queued after it on the current stream sees the means. The host does not wait for the
        GPU. A second call averages again: means of equal tensors, whose last bits may change unless
        the number of ranks is a power of two.

        Raises RuntimeError:

        - within ``no_sync``;
        - for a parameter that was frozen, thawed, added or replaced since it was wrapped;
        - on every rank, with the number of a rank that has run other forwards since the last step
          than the rest, because it skipped a step for example. On GPUs this is seen one step later.
          Forwards in ``no_sync`` and ``no_grad`` do not count.
        """
        if not self._synchronizing:
            raise RuntimeError("finish_gradient_synchronization is called outside of no_sync()")
        self._members.check()
        forwards = self._step.forwards
        missing = self._fill_missing()
        problem = self._average()
        self._step = self._new_step()
        for i in self._agreement.end_step(missing, forwards):
            self._trained[i].grad = None
        if problem:
            raise RuntimeError(problem)

    def unfinished(self) -> Sequence[Tensor]:
        """Return the parameters, while some have gradients that wait for the finish."""
        step = self._step
        waits = step.accumulated if self._synchronizing else step.is_due
        return self._trained if waits else ()

    def meet(self, optimizer: Optimizer) -> None:
        """Do nothing: an optimizer over these parameters has all of them whole."""

    def _fill_missing(self) -> list[int]:
        """Give zeros to the parameters without a gradient, and return their places."""
        missing = []
        for i, p in enumerate(self._trained):
            if p.grad is None:
                missing.append(i)
                p.grad = torch.zeros_like(p)
        return missing

    def _new_step(self) -> _Step:
        return _Step()

    def _gradient_is_there(self, i: int) -> None:
        self._step.accumulated = True
        self._step.is_due |= self._synchronizing

    def _average(self) -> str:
        """Make each ``.grad`` the mean, all of them present; in the same order on every rank.
        Return why they are not the means, "" where they are."""
        raise NotImplementedError

    def _check_dense(self, i: int) -> None:
        if self._trained[i].grad.is_sparse:
            raise ValueError(f"{self._names[i]} has a sparse gradient; only dense ones travel")

    def _dense(self, i: int) -> Tensor:
        """Return the gradient, which has its parameter's strides, as NCCL wants it, contiguous:
        itself or a copy."""
        self._check_dense(i)
        return self._trained[i].grad.contiguous()

    def __getstate__(self):
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; take its .module")


class NaiveDDP(_Replica):
    """Average gradients by one blocking all-reduce per parameter, after the backward.

    It is the slow, obvious twin of the other three wrappers. All four share what follows.

    Arguments:

    - ``module`` is wrapped as it is, not copied. Its parameters and buffers become those of the
      group's rank 0. Buffers are not sent again later. Frozen parameters stay frozen, others not.
    - ``group`` is a process group, by default that of all ranks. Each of its ranks makes the
      wrapper.

    A step is a forward, a backward, ``finish_gradient_synchronization()`` and the optimizer's step.
    After the finish each ``.grad`` is the mean over the ranks. A parameter that has a gradient on
    some ranks only counts as zero on the others. One without a gradient on every rank keeps
    ``.grad`` None, so that the optimizer skips it. A step that is not to be taken is finished all
    the same, and then ``zero_grad``. After a backward that raised, end the processes.

    Raises RuntimeError without a process group. Raises ValueError for modules that differ between
    ranks, are on several devices or on meta, train complex parameters, or contain an FSDP. Drop a
    wrapper before the module is wrapped anew: both would wait for a finish.
    """

    def _average(self) -> str:
        for i, p in enumerate(self._trained):
            dense = self._dense(i)
            dist.all_reduce(dense, mean_operator([dense], self.group), group=self.group)
            if dense is not p.grad:
                p.grad.copy_(dense)
        return ""


class FlatDDP(_Replica):
    """Average gradients by one blocking all-reduce per dtype, after the backward.

    All gradients of a dtype are copied into one tensor, so the peak of memory has the gradients
    twice. Arguments, methods and errors are those of ``NaiveDDP``.
    """

    def _average(self) -> str:
        for alike in group_by(range(len(self._trained)), lambda i: self._trained[i].dtype):
            flat = torch.cat([self._dense(i).view(-1) for i in alike])
            dist.all_reduce(flat, mean_operator([flat], self.group), group=self.group)
            begin = 0
            for i in alike:
                grad = self._trained[i].grad
                grad.copy_(flat[begin : begin + grad.numel()].view_as(grad))
                begin += grad.numel()
        return ""


@dataclass(slots=True)
class _Message:
    """Gradients on their way. It holds the tensors that travel, which the backend does not."""

    grads: list[Tensor]
    travelling: list[Tensor]  # the gradients themselves, or copies in another dtype
    works: list[dist.Work]
    on_lane: bool = False  # the lane writes the means
    end: torch.cuda.Event | None = None  # of that

    def write(self) -> None:
        """Let the current stream wait for the message, and write it into the gradients."""
        for work in self.works:
            work.wait()
        for grad, arrived in zip(self.grads, self.travelling, strict=True):
            if arrived is not grad:
                grad.copy_(arrived)


class Backend:
    """Asynchronous all-reduces of NCCL or gloo, one call a bucket, on the gradients themselves or,
    in another dtype, on copies."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype, self._mean = dtype, Mean(group)
        self._sent: list[_Message] = []
        self._lane = Lane(device)

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Take note of each bucket's parameters; nothing of the old ones is on its way."""

    def send(self, bucket: int, params: Sequence[Tensor], then: Then | None = None) -> None:
        """Start the all-reduce of the parameters' gradients; ``bucket`` counts them. ``then`` is
        called with them on a stream that waits for the message; on the CPU the host does."""
        grads, travelling = [], []
        for p in params:
            grads.append(p.grad)
            travelling.append(_as_sent(p.grad, self._dtype))
        message = _Message(grads, travelling, self._mean(travelling))
        self._sent.append(message)
        if then is None:
            return

        def write_and_go_on() -> None:
            message.write()
            then(params)

        message.end = self._lane.run(write_and_go_on)
        message.on_lane = True

    def arrive(self) -> None:
        """Let the current stream wait for all that was sent, and have it in the gradients."""
        sent, self._sent = self._sent, []
        for message in sent:
            if message.on_lane:
                Lane.wait(message.end)
            else:
                message.write()


def _as_sent(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the gradient contiguous and in the dtype it travels in: itself or a copy."""
    if dtype is None or not grad.is_floating_point():
        return grad.contiguous()
    return grad.to(dtype, memory_format=torch.contiguous_format)


class BucketedDDP(_Replica):
    """Average gradients by one asynchronous all-reduce per bucket, during the backward.

    A bucket is a group of gradients of one dtype. It is sent as soon as its last gradient is there.

    Arguments:

    - ``module`` and ``group`` are those of ``NaiveDDP``, as are the methods.
    - ``bucket_size_mb`` is the most that a bucket holds, in MB of 2**20 bytes. A parameter that is
      larger is a bucket by itself.
    - ``communication`` says what sends a bucket. "backend" is one call of NCCL or gloo on the
      gradients themselves. "copy_engines" is for CUDA and GPUs of one host that reach each other's
      memory, and for large buckets (100 MB was measured). "auto" is copy engines where they can be
      used, else the backend; the attribute ``why_backend`` then says why. The attribute
      ``communication`` has the choice.
    - ``communication_dtype`` is the dtype in which floating gradients are sent. None sends each in
      its own; bfloat16 halves the bytes of float32. ``.grad`` keeps its dtype.

    Order: every rank sends its buckets in the order in which rank 0's first backward made the
    gradients, and in that one in the reverse order of registration. A parameter that gets no
    gradient delays all later buckets until the finish. Hooks of a module that is compiled as a
    whole fire after its backward: compile block by block. To capture a step in a CUDA graph, run a
    few steps first: the first finish reads the order on the host.

    Between a backward and the finish, RuntimeError is raised for a second gradient of a parameter
    (a second backward outside of ``no_sync``, or a checkpoint with use_reentrant=True around a
    module that is used twice) and for another tensor in its ``.grad``, because the first gradient
    may be on its way.

    With copy engines, each ``.grad`` is a view of memory that stays, and the next means overwrite
    it. The gradients that the backward made are kept until the finish as well.

    Rounding: copy engines add in float32, in the order of the ranks, and round the mean once. A
    backend adds in the dtype that is sent, and may round at each of the additions. With two
    ranks the two round alike.

    Raises ValueError for "copy_engines" where they cannot be used, and for other wrong arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float,
        group: dist.ProcessGroup | None = None,
        *,
        communication: str = "backend",
        communication_dtype: torch.dtype | None = None,
    ) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be above 0; got {bucket_size_mb!r}")
        if communication_dtype is not None and not communication_dtype.is_floating_point:
            raise ValueError(
                f"communication_dtype must be a floating dtype or None; got {communication_dtype}"
            )
        # First: a wrapper that has hooks stays, in a traceback for example, where this raises.
        self.communication, self.why_backend = choose(communication, group, one_device(module))
        super().__init__(module, group)
        carriers = {"backend": Backend, "copy_engines": CopyEngines}
        self._carrier = carriers[self.communication](group, self.device, communication_dtype)
        self._bucket_bytes = bucket_size_mb * MB
        self._then: Then | None = None
        self._order_known = False
        self._make_buckets(range(len(self._trained))[::-1])
        self._step = self._new_step()

    @contextlib.contextmanager
    def each_mean(self, then: Then) -> Iterator[None]:
        """Within it each bucket that leaves during backward has ``then(parameters)`` called, once
        their ``.grad`` are the means, on the stream where they become so. Work that ``then`` queues
        elsewhere, the caller waits for.

        A bucket that waits for a gradient until the finish, which may then be None, has no call.
        """
        before, self._then = self._then, then
        try:
            yield
        finally:
            self._then = before

    def _make_buckets(self, order: Sequence[int], seen: int | None = None) -> None:
        """Cut ``order`` into buckets; what comes after its first ``seen`` starts one anew."""
        self._buckets: list[list[int]] = []
        open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
        place_of: dict[int, int] = {}
        for place, i in enumerate(order):
            p, place_of[i] = self._trained[i], place
            if place == seen:
                open_buckets.clear()
            bucket, held = open_buckets.get(p.dtype, (None, 0))
            if bucket is None or held + p.nbytes > self._bucket_bytes:
                bucket, held = [], 0
                self._buckets.append(bucket)
            bucket.append(i)
            open_buckets[p.dtype] = bucket, held + p.nbytes
        # A bucket leaves when its last gradient is there: in the order of those.
        self._buckets.sort(key=lambda bucket: place_of[bucket[-1]])
        self._bucket_of: dict[int, int] = {}
        self._bucket_parameters: list[list[nn.Parameter]] = []
        for number, bucket in enumerate(self._buckets):
            for i in bucket:
                self._bucket_of[i] = number
            self._bucket_parameters.append([self._trained[i] for i in bucket])
        self._carrier.lay_out(self._bucket_parameters)

    def _new_step(self) -> _Step:
        return _Step(waits_for=list(map(len, self._buckets)))

    def _gradient_is_there(self, i: int) -> None:
        now = self._step
        now.accumulated = True
        if not self._synchronizing:
            return
        now.is_due = True
        if i in now.arrived:
            raise RuntimeError(
                f"{self._names[i]} got a second gradient before finish_gradient_synchronization: "
                "run all backwards but the last in no_sync(), and checkpoint with "
                "use_reentrant=False; after a backward that raised end all processes"
            )
        now.arrived[i] = None
        now.waits_for[self._bucket_of[i]] -= 1
        while now.next < len(now.waits_for) and not now.waits_for[now.next]:
            # Already so in a backward, but for one with create_graph.
            with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
                self._send_next(self._then)

    def _send_next(self, then: Then | None = None) -> None:
        """Without recording a graph."""
        now = self._step
        bucket = self._buckets[now.next]
        for i in bucket:
            self._check_dense(i)
        self._carrier.send(now.next, self._bucket_parameters[now.next], then)
        now.next += 1
        for i in bucket:
            now.sent.append((i, self._trained[i].grad))

    def _average(self) -> str:
        now = self._step
        while now.next < len(self._buckets):
            self._send_next()
        replaced = [i for i, grad in now.sent if self._trained[i].grad is not grad]
        self._carrier.arrive()
        if not self._order_known:
            self._take_order(list(now.arrived))
        if replaced:
            return (
                f"the gradient of {self._names[replaced[0]]} was replaced between backward and "
                "finish_gradient_synchronization; clip, unscale and zero after it"
            )
        return ""

    def _take_order(self, arrived: list[int]) -> None:
        """Agree on the order of rank 0, of this first backward if it had one."""
        orders = [arrived]
        dist.broadcast_object_list(orders, group=self.group, device=self.device, group_src=0)
        (first,) = orders
        if first:
            # What is not in it comes behind, in the order of before.
            everything = dict.fromkeys([*first, *reversed(range(len(self._trained)))])
            self._make_buckets(list(everything), len(first))
            self._order_known = True


class DDP(BucketedDDP):
    """Average gradients by one asynchronous all-reduce per parameter, during the backward.

    Each gradient is sent where it lies, as soon as the backward has added it up. Arguments, methods
    and errors are those of ``NaiveDDP``; the order of sending and its limits are those of
    ``BucketedDDP``.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, 1 / MB, group)  # no second gradient fits in


def _hook(me: weakref.ref[_Replica], i: int):
    # The parameters hold their hooks, so these do not hold the wrapper: dropped, it is gone.
    def gradient_is_there(_: Tensor) -> None:
        wrapper = me()
        if wrapper is not None:
            wrapper._gradient_is_there(i)

    return gradient_is_there


def _remove(hooks: list) -> None:
    for hook in hooks:
        hook.remove()
