"""Calls, and steps of several processes, captured in CUDA graphs: one launch each, collectives too.

Launched from Python, a step on a fast GPU waits for the host, and communication that seems hidden
may hide in the host's gaps. A replay's time is the GPU's. Where a capture fails, end the process:
PyTorch is not fit for more work then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # there is none by a public name

Call = Callable[[], object]
WARMUP = 3  # steps
# One stream per device and priority for the life of the process: cuBLAS keeps a workspace for each
# it has seen.
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class CudaGraphs:
    """CUDA graphs captured on one side stream of the current device.

    ``error_mode`` is that of torch.cuda.graph: what other threads may do meanwhile. ``priority`` is
    the stream's: the kernels of one below 0 stand before others.
    """

    def __init__(self, error_mode: str = "global", priority: int = 0) -> None:
        self._error_mode = error_mode
        place = torch.cuda.current_device(), priority
        if place not in _streams:
            _streams[place] = torch.cuda.Stream(priority=priority)
        self._stream = _streams[place]

    def on_stream(self) -> AbstractContextManager:
        """Return the context in which the side stream is current, after all that was queued."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def capture(self, make: Callable[[], Call], calls: int) -> CapturedGraph:
        """Return a graph of the call that ``make`` returns, run ``calls`` times before.

        Both happen on one stream that is not the default one: autograd runs a backward on the
        stream of its forward, and only one's own work can be captured. Raises what the capture
        raised first. The outputs of the call, a tensor or a tuple of tensors, are filled with NaN
        and must come back finite from a first replay.
        """
        with self.on_stream():
            call = make()
            for _ in range(calls):
                call()
        graph, outputs, first = torch.cuda.CUDAGraph(), [], None
        collecting = gc.isenabled()
        # A cycle collected in mid-capture may free what other streams have used.
        gc.disable()
        try:
            # The outer context, since graph() leaves its stream current where its end fails.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode=self._error_mode),
            ):
                try:
                    outputs = _floating(call())
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            # The end of a broken capture fails with words of its own.
            raise (first or error) from None
        finally:
            if collecting:
                gc.enable()
        self._check(graph, outputs)
        return CapturedGraph(graph, call)

    def _check(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor]) -> None:
        """Raise where a replay leaves an output as it was: then not all of the call is captured."""
        with torch.cuda.stream(self._stream):
            for output in outputs:
                output.fill_(float("nan"))
            graph.replay()
            self._stream.synchronize()
            for output in outputs:
                if not output.isfinite().all():
                    raise RuntimeError("its replay does not write all of its outputs")


def _floating(result: object) -> list[Tensor]:
    """Return the floating tensors of what a call returned."""
    tensors = []
    for x in result if isinstance(result, tuple | list) else [result]:
        if isinstance(x, Tensor) and x.is_floating_point():
            tensors.append(x.detach())
    return tensors


class CapturedGraph:
    """``replay()`` queues the captured kernels on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Call) -> None:
        self._graph, self._call = graph, call
        self.replay = graph.replay

    def release(self) -> None:
        """Drop the graph, its memory and the tensors that it reads."""
        self._graph.reset()
        self._call = None  # held until here for the tensors that the kernels read


class CapturedStep:
    """A step that ``capture_step`` has captured. ``output`` is what the step returned, detached;
    each replay writes it anew."""

    def __init__(self, graph: CapturedGraph, output: object) -> None:
        self._graph, self.output = graph, output
        self._streams: set[torch.cuda.Stream] = set()  # that replays were queued on

    def replay(self) -> object:
        """Queue the step on the current stream; returns ``output``. Every rank replays."""
        self._graph.replay()
        self._streams.add(torch.cuda.current_stream())
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


def capture_step(step: Callable[[], object]) -> CapturedStep:
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

    Three steps are taken before the capture, so four in all. In them the order of the gradients is
    agreed on, and memory, communicators and kernels are made.

    ``step`` takes no arguments and returns tensors, of which the floating ones must be finite. It
    is called on a side stream; every wrapper of this package can be part of it. It must fulfil
    these conditions:

    - Each call does the same work on the same addresses: between replays write inputs in place, and
      also a learning rate that changes, which has to be a tensor.
    - The optimizer counts its steps on the GPU (``capturable=True``).
    - The caller holds no loss or output of an earlier step. Autograd would hand the gradients over
      on that step's stream, which is not captured.
    - Nothing is read on the host.
    - The same parameters have a gradient in every step, those of the warm-up too.

    Returns a CapturedStep. Gradients live in the graph's memory, which ``release()`` or the end of
    the context frees.

    Raises RuntimeError without a GPU. What the capture raises passes through; then end the process:
    that step's messages were recorded and never sent.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA graph needs a GPU, and there is none here; call the step itself")
    output = None

    def detached(x: object) -> object:
        return x.detach() if isinstance(x, Tensor) else x

    def work() -> object:
        nonlocal output
        output = None  # of the step before: see above
        output = tree_map(detached, step())
        return output

    # NCCL's watchdog, a thread of its own, asks after earlier work meanwhile.
    graphs = CudaGraphs(error_mode="thread_local")
    try:
        graph = graphs.capture(lambda: work, WARMUP)
    except Exception as error:
        error.add_note("a step that was being captured is cut off: end the processes of all ranks")
        raise
    return CapturedStep(graph, output)
