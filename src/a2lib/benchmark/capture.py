"""Steps that are one launch each: the work of a step captured in a CUDA graph and replayed.

A replay launches all kernels of a step at once, so that neither Python, autograd nor the optimizer
takes the host's time: what remains is the GPU's. The same kernels run in the same order on the same
addresses as when they were captured; inputs are static (a new batch would be copied into
``workload.token_ids``), gradients live in the graph's memory and are gone for the host.
"""

import contextlib
import dataclasses

from a2lib.benchmark.ranges import Stopwatch
from a2lib.benchmark.result import StepTimes
from a2lib.benchmark.workload import Workload
from a2lib.errors import UnsupportedError
from a2lib.measure.failures import classify
from a2lib.measure.graphs import CudaGraphs


class CapturedSteps:
    """Captures a step of ``workload``, replays it once, under the name ``first``, and then ``step``
    by ``step``.

    Everything the workload does, from its building on, belongs on the stream of ``graphs``, and it
    has made a step before: autograd hands gradients over on the stream that first used a parameter,
    and the optimizer's state, cuBLAS and compiled kernels are made in a first step. Capturing runs
    nothing, so a replay is the step that would have come next. In the first replay the loss and
    every gradient must come back finite (see ``CudaGraphs.capture``).

    ``times`` has those of the first replay. Raises what the capture raised, with the process made
    fit for further work, or graphs.Unusable where it is not; UnsupportedError, with the reason,
    where only the capture refuses the step.
    """

    def __init__(self, workload: Workload, stopwatch: Stopwatch, graphs: CudaGraphs, first: str):
        self._workload = workload
        stopwatch.where = "capture"

        def first_replay(replay) -> None:
            self.times = self._timed(replay, stopwatch, first)

        try:
            with stopwatch.ranges("capture"):
                self._graph = graphs.capture(lambda: self._work, 0, first_replay)
        except Exception as error:
            graphs.mend()
            if not isinstance(error, RuntimeError) or classify(error)[0] != "error":
                raise
            # The step before ran, so what fails here is the capture or its first replay.
            raise UnsupportedError(f"no CUDA graph of this step: {error}") from error

    def _work(self) -> list:
        """The step's work; what each replay has to write: loss or logits, and the gradients."""
        written = []

        def phase(name: str):
            if name == "optimizer":  # whose end drops the gradients
                written.extend(self._workload.gradients())
            return contextlib.nullcontext()

        self._output = self._workload.work(phase).detach()
        written += [self._output, *self._workload.gradients()]
        self._workload.drop_gradients()
        return written

    def step(self, stopwatch: Stopwatch, name: str) -> StepTimes:
        """One replay: the step's times without phases; ``host_ms`` is that of its launch."""
        return self._timed(self._graph.replay, stopwatch, name)

    def _timed(self, replay, stopwatch: Stopwatch, name: str) -> StepTimes:
        with stopwatch.step(name) as done, stopwatch.phase("replay"):
            replay()
        loss = self._output if "loss" in self._workload.config.phases else None
        return self._workload.with_loss(dataclasses.replace(done[0], ms={}), loss)

    def close(self) -> None:
        """Drop the graph and its memory."""
        self._graph.release()
