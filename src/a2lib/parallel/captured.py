"""A step of several processes as one launch: captured in a CUDA graph, collectives too.

    optimizer = torch.optim.AdamW(module.parameters(), fused=True, capturable=True)

    def step():
        optimizer.zero_grad()
        loss = loss_of(ddp(tokens), tokens)
        loss.backward()
        ddp.finish_gradient_synchronization()
        optimizer.step()
        return loss

    with capture_step(step) as captured:
        for batch in batches:
            tokens.copy_(batch)
            captured.replay()                     # captured.output is the loss

Launched from Python, a step on a fast GPU waits for the host, and communication that seems hidden
may hide in the host's gaps. A replay's time is the GPU's.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch.utils._pytree import tree_map  # there is none by a public name

from a2lib.parallel.graphs import CapturedGraph, CudaGraphs


class CapturedStep:
    """A step that ``capture_step`` has captured. ``output`` is what the step returned, detached;
    each replay writes it anew. ``steps_taken`` counts the steps that the weights have taken."""

    def __init__(self, graph: CapturedGraph, output: object, steps_taken: int) -> None:
        self._graph, self.output, self.steps_taken = graph, output, steps_taken
        self._streams: set[torch.cuda.Stream] = set()  # that replays were queued on

    def replay(self) -> object:
        """Queue the step on the current stream; returns ``output``. Every rank replays."""
        self._graph.replay()
        self._streams.add(torch.cuda.current_stream())
        self.steps_taken += 1
        return self.output

    def release(self) -> None:
        """Drop the graph and its memory. A process group must not be destroyed before: NCCL waits
        for the graphs that hold its work."""
        for stream in self._streams:
            stream.synchronize()
        self._graph.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def capture_step(step: Callable[[], object], warmup: int = 3) -> CapturedStep:
    """Take ``warmup`` steps, capture the next one, and take that as the first replay; collective.

    ``step`` takes no arguments and returns tensors, of which the floating ones must come out
    finite. It is called on a side stream, and every time must do the same work on the same
    addresses: inputs are written in place between replays, and so is a learning rate that changes,
    which has to be a tensor. Every wrapper of this package can be in it. What it needs:

    - An optimizer that counts its steps on the GPU (``capturable=True``).
    - No loss or output of an earlier step still held by the caller: autograd would hand the
      gradients over on that step's stream, which is not captured.
    - Nothing read on the host. A parameter without a gradient has none in the warm-up either.
    - At least one step of warm-up: the order of the gradients is agreed on in it, and memory,
      communicators and kernels are made.

    Gradients live in the graph's memory. Raises ValueError without a step of warm-up, RuntimeError
    without a GPU, and what the capture raised. The process has to end then: of the step that was
    cut off, messages and updates were recorded and never sent.
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1; got {warmup!r}")
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA graph needs a GPU, and there is none here; call the step itself")
    output = None

    def work() -> list[torch.Tensor]:
        nonlocal output
        output = None  # of the step before: see above
        output = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, step())
        return output

    # NCCL's watchdog, a thread of its own, asks after earlier work meanwhile.
    graphs = CudaGraphs(error_mode="thread_local")
    try:
        graph = graphs.capture(lambda: work, warmup)
    except Exception as error:
        error.add_note("a step that was being captured is cut off: end the processes of all ranks")
        raise
    return CapturedStep(graph, output, warmup + 1)
