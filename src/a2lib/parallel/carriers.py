"""Choose between the group's backend and copy engines; make a bucket of gradients the mean over
the ranks by the backend."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.copy_engines import Then, why_not
from a2lib.parallel.group import Mean
from a2lib.parallel.lane import Lane

COMMUNICATIONS = ("backend", "copy_engines", "auto")


class Backend:
    """Asynchronous all-reduces of NCCL or gloo, one call a bucket, on the gradients themselves or,
    in another dtype, on copies."""

    def __init__(self, group: dist.ProcessGroup | None, dtype: torch.dtype | None = None) -> None:
        self.group, self._dtype = group, dtype
        self._mean = Mean(group)
        # Of each message the gradients and what is sent of them, held until it has arrived since
        # the backend does not, and what lets the current stream wait for it.
        self._sent: list[tuple[list[Tensor], list[Tensor], Callable[[], None]]] = []
        self._lane: Lane | None = None

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Take note of each bucket's parameters; nothing of the old ones is on its way."""

    def send(self, bucket: int, params: Sequence[Tensor], then: Then | None = None) -> None:
        """Start the all-reduce of the parameters' gradients; ``bucket`` counts them. ``then`` is
        called with them on a stream that waits for the message; on the CPU the host does."""
        grads = [p.grad for p in params]
        dense = [as_sent(g, self._dtype) for g in grads]
        works = self._mean(dense)

        def write() -> None:
            for work in works:
                work.wait()
            for grad, arrived in zip(grads, dense, strict=True):
                if arrived is not grad:
                    grad.copy_(arrived)

        if then is None:
            self._sent.append((grads, dense, write))
            return

        def write_and_go_on() -> None:
            write()
            then(params)

        self._lane = self._lane or Lane(grads[0].device)
        end = self._lane.run(write_and_go_on)
        self._sent.append((grads, dense, functools.partial(Lane.wait, end)))

    def arrive(self) -> None:
        """Let the current stream wait for all that was sent, and write it into the gradients."""
        sent, self._sent = self._sent, []
        for _, _, wait in sent:
            wait()


def as_sent(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the gradient contiguous and in the dtype it travels in: itself or a copy."""
    if dtype is None or not grad.is_floating_point():
        return grad.contiguous()
    return grad.to(dtype, memory_format=torch.contiguous_format)


def choose(
    communication: str, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[str, str | None]:
    """Return "backend" or "copy_engines", and why "auto" took the backend, None where it did not;
    collective. Raises ValueError for "copy_engines" where they cannot, and for another word."""
    if communication not in COMMUNICATIONS:
        raise ValueError(f"communication must be one of {COMMUNICATIONS}; got {communication!r}")
    if communication == "backend":
        return "backend", None
    reason = why_not(group, device)
    if reason is None:
        return "copy_engines", None
    if communication == "copy_engines":
        raise ValueError(f"copy engines cannot do it here: {reason}; 'backend' or 'auto' can")
    return "backend", reason
