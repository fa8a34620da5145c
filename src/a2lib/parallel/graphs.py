"""Calls captured in CUDA graphs; a capture that fails gives back what it took.

Importing this needs no torch; capturing does.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable

Call = Callable[[], object]
# One stream per device and priority for the life of the process: cuBLAS keeps a workspace for each
# it has seen.
_streams: dict = {}
# Graphs whose capture was cut off: PyTorch's allocators may still ask them whether they capture.
_cut_off: list = []


class CudaGraphs:
    """CUDA graphs captured on one side stream of the current device.

    ``error_mode`` is that of torch.cuda.graph: what other threads may do meanwhile. ``priority`` is
    the stream's: the kernels of one below 0 stand before others.
    """

    def __init__(self, error_mode: str = "global", priority: int = 0) -> None:
        import torch

        self._error_mode = error_mode
        self._torch, self._cuda = torch, torch.cuda
        self._device = torch.cuda.current_device()
        place = self._device, priority
        if place not in _streams:
            _streams[place] = torch.cuda.Stream(priority=priority)
        self._stream = _streams[place]

    def on_stream(self):
        """Return the context in which the side stream is current, after all that was queued."""
        self._stream.wait_stream(self._cuda.current_stream())
        return self._cuda.stream(self._stream)

    def capture(self, make: Callable[[], Call], calls: int) -> CapturedGraph:
        """Return a graph of the call that ``make`` returns, run ``calls`` times before.

        Both happen on one stream that is not the default one: autograd runs a backward on the
        stream of its forward, and only one's own work can be captured. Raises what the capture
        raised first, everything it had taken given back. The outputs of the call, a tensor or a
        tuple of tensors, are filled with NaN and must come back finite from a first replay.
        """
        cuda = self._cuda
        with self.on_stream():
            call = make()
            for _ in range(calls):
                call()
        graph, pool = cuda.CUDAGraph(), cuda.graph_pool_handle()
        outputs, first = [], None
        collecting = gc.isenabled()
        # A cycle collected in mid-capture may free what other streams have used.
        gc.disable()
        try:
            # The outer context, since graph() leaves its stream current where its end fails.
            with (
                cuda.stream(self._stream),
                cuda.graph(
                    graph, pool=pool, stream=self._stream, capture_error_mode=self._error_mode
                ),
            ):
                try:
                    outputs = self._tensors(call())
                except Exception as error:
                    first = error
                    raise
            self._check(graph, outputs)
        except Exception as error:
            outputs.clear()
            # What the failed call held (a loss, and with it autograd's nodes, which keep to this
            # stream) would live as long as the error, and where that is in a cycle, longer.
            _clear_frames(error)
            self._abandon(graph, pool)
            # The end of a broken capture fails with words of its own.
            raise (first or error) from None
        finally:
            first = None  # its frames, this one too, would hold it and with it the call's tensors
            if collecting:
                gc.enable()
        return CapturedGraph(graph, call)

    def _tensors(self, result: object) -> list:
        results = result if isinstance(result, tuple | list) else [result]
        tensors = [x for x in results if isinstance(x, self._torch.Tensor)]
        return [x.detach() for x in tensors if x.is_floating_point()]

    def _check(self, graph, outputs: list) -> None:
        """Raise where a replay leaves an output as it was: then not all of the call is captured."""
        with self._cuda.stream(self._stream):
            for output in outputs:
                output.fill_(float("nan"))
            graph.replay()
            self._stream.synchronize()
            if not all(output.isfinite().all().item() for output in outputs):
                raise RuntimeError("its replay does not write all of its outputs")

    def _abandon(self, graph, pool) -> None:
        try:
            graph.pool()  # raises unless the capture came to its end
        except RuntimeError:
            # Then PyTorch (2.11 to 2.13) leaves its allocator writing to the pool, which nothing
            # with a public name ends.
            _cut_off.append(graph)
            for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with contextlib.suppress(Exception):
                    getattr(self._torch._C, end)(self._device, pool)
        else:
            graph.reset()


class CapturedGraph:
    """``replay()`` queues the captured kernels on the current stream."""

    def __init__(self, graph, call: Call) -> None:
        self._graph, self._call = graph, call
        self.replay = graph.replay

    def release(self) -> None:
        """Drop the graph, its memory and the tensors that it reads."""
        self._graph.reset()
        self._call = None  # held until here for the tensors that the kernels read


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, and of those that it came from."""
    seen = []
    remaining = [error]
    while remaining:
        link = remaining.pop()
        if link is not None and all(link is not other for other in seen):
            seen.append(link)
            traceback.clear_frames(link.__traceback__)
            remaining += [link.__cause__, link.__context__]
