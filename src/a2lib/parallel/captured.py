"""A step of several processes as one launch: captured in a CUDA graph, collectives too.

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
    """Capture a training step in a CUDA graph, and replay it once; every rank calls it.

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
                tokens.copy_(batch)  # an input is written in place
                loss = captured.replay()

    ``warmup`` steps are taken before the capture, so ``warmup + 1`` steps are taken in all. Every
    wrapper of this package can be part of the step.

    Arguments:

    - ``step`` takes no arguments and returns tensors, of which the floating ones must be finite. It
      is called on a side stream. Each call must do the same work on the same addresses: between
      replays write inputs in place, and also a learning rate that changes, which has to be a
      tensor.
    - ``warmup`` is the number of steps before the capture, at least 1. In them the order of the
      gradients is agreed on, and memory, communicators and kernels are made.

    The step must fulfil these conditions:

    - The optimizer counts its steps on the GPU (``capturable=True``).
    - The caller holds no loss or output of an earlier step. Autograd would hand the gradients over
      on that step's stream, which is not captured.
    - Nothing is read on the host.
    - The same parameters have a gradient in every step, those of the warm-up too.

    Returns a CapturedStep. Its ``replay()`` takes a step and returns the output, which each replay
    writes anew. Gradients live in the graph's memory, which ``release()`` or the end of the context
    frees.

    Raises ValueError without a step of warm-up and RuntimeError without a GPU. What the capture
    raises passes through; then end the process, because messages and updates of that step were
    recorded and never sent.
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
