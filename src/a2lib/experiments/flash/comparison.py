"""Measure the implementations at one shape, in one process: every outcome is a row.

Order, and why. Each implementation is first run once forward and once backward and checked against
float64 (a wrong result is an `error` row, never a time), then its peak memory is read around single
calls. Timing comes last and pass by pass: all forwards in turns, then all backwards, then end to
end, so that a drifting clock reaches all peers alike. A pass that needs more than ``SHARE`` of the
memory is timed on its own instead: the caching allocator would otherwise give its blocks back and
fetch them again on every turn, inside the timed region.

Each pass is timed three ways: called by the host (``ms``), the host's own time for that
(``ms_host``), and the same kernels replayed from a CUDA graph, where the host has no part
(``ms_graph``). A call that cannot be captured has no ``ms_graph`` and says why in its note.

forward is that of training: it saves what the backward needs. backward is
``torch.autograd.grad(o, (q, k, v), do, retain_graph=True)`` on one graph made outside the timing.
end_to_end is both.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

from a2lib.experiments.flash import peers, sanity
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.worker import Job, free_memory
from a2lib.experiments.passes import in_turns, one_pass
from a2lib.measure import FLASH, failures, memory
from a2lib.theory.attention import PASSES

SHARE = 0.04
TIMING = {
    "cuda": {"warmup_ms": 20, "rep_ms": 150, "min_n": 5, "max_n": 300},
    "cpu": {"warmup_ms": 10, "rep_ms": 200, "min_n": 1, "max_n": 200},
}

prepare = peers.configure


def measure(job: Job) -> None:
    """The implementations at one shape. Raises failures.LostContext, its row stored, where the
    device has to be reset."""
    Comparison(job).run()


class Comparison:
    """The wanted passes of each implementation at one shape, in turns or each timed alone."""

    def __init__(self, job: Job) -> None:
        self.job, self.device, self.shape = job, job.device, Shape(**job.spec["shape"])
        # What is still to be timed, and the peak of its memory once that is known.
        self.peaks: dict[tuple[str, str], int | None] = {}
        self.forwards: dict[str, Callable] = {}

    def run(self) -> None:
        self._reset()
        names = [name for name in self.job.wanted if not self._ruled_out(name)]
        if names and (failed := _tried(self._make_inputs)):
            for name in names:
                self._fail(name, self._left(name), failed)
        elif names:
            for name in names:
                if self.job.expired():
                    break
                self.job.begin(name)
                self._prepare(name)
            del self.expected
            for pass_ in PASSES:
                self._time(pass_)
        self._reset()

    def _make_inputs(self) -> None:
        shape = self.shape
        *self.qkv, self.do = peers.inputs(shape, self.device, self.job.seed)
        how = {"causal": shape.causal, "dtype": shape.dtype}
        self.expected = sanity.Expected(*self.qkv, self.do, **how)

    def _ruled_out(self, name: str) -> bool:
        """Store the rows that need no trial; whether no pass is left to try."""
        passes = [key["pass"] for key in self.job.wanted[name]]
        if failed := _tried(lambda: peers.check(name, self.device)):
            self._fail(name, passes, failed)
            return True
        for pass_ in passes:
            needed = peers.host_bytes(name, self.shape, pass_)
            if not self.job.would_swap(needed, [self.shape.key(name, pass_)]):
                self.peaks[name, pass_] = None
        return not self._left(name)

    def _left(self, name: str) -> list[str]:
        return [pass_ for pass_ in PASSES if (name, pass_) in self.peaks]

    def _prepare(self, name: str) -> None:
        """Build, check, and read the peak memory of one implementation."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            failed = _tried(lambda: self._check_output(name))
        if failed:
            return self._fail(name, self._left(name), failed, [str(w.message) for w in caught])
        with_grad = [pass_ for pass_ in self._left(name) if pass_ != "forward"]
        if with_grad and (failed := _tried(lambda: self._check_gradients(name))):
            self._fail(name, with_grad, failed)
        self.first = None
        for pass_ in self._left(name) if self.device == "cuda" else ():
            if failed := _tried(functools.partial(self._read_peak, name, pass_)):
                self._fail(name, [pass_], failed)

    def _check_output(self, name: str) -> None:
        forward = peers.build(name, self.shape, self.device)
        o = forward(*self.qkv)
        self.expected.check_output(o.detach())
        self.forwards[name], self.first = forward, o

    def _check_gradients(self, name: str) -> None:
        import torch

        o, self.first = self.first, None
        self.expected.check_gradients(*torch.autograd.grad(o, self.qkv, self.expected.do))
        del o
        gradients = self._call(name, "end_to_end")()
        for which, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            sanity.check_finite(which, gradient)

    def _read_peak(self, name: str, pass_: str) -> None:
        from a2lib.measure import peak_bytes

        self.peaks[name, pass_] = peak_bytes(self._call(name, pass_))

    def _time(self, pass_: str) -> None:
        names = [name for name, p in self.peaks if p == pass_ and name in self.forwards]
        together = [n for n in names if self.job.in_turns and not self._is_large(n, pass_)]
        if together:
            self.job.begin(None if len(together) > 1 else together[0])
            self._time_group(together, pass_)
        for name in (name for name in names if name not in together):
            self.job.begin(name)
            free_memory(self.device)
            self._time_group([name], pass_)
            free_memory(self.device)

    def _time_group(self, names: list[str], pass_: str) -> None:
        makers = {name: functools.partial(self._call, name, pass_) for name in names}
        results, usable = in_turns(makers, FLASH, self.device, **TIMING[self.device])
        rows = []
        for name, result in results.items():
            if isinstance(result, Exception):
                self._fail(name, [pass_], result)
                continue
            row = self.shape.key(name, pass_) | {"peak_bytes": self.peaks[name, pass_]}
            rows.append(row | {"status": "ok", "note": ""} | result)
        self.job.put(*rows)
        if not usable:
            raise failures.LostContext("a failed CUDA graph")

    def _call(self, name: str, pass_: str, *, anew: bool = False) -> Callable[[], object]:
        return one_pass(self.forwards[name], self.qkv, self.do, pass_, anew=anew)

    def _is_large(self, name: str, pass_: str) -> bool:
        # A held graph keeps about what a forward leaves behind, which end_to_end's estimate bounds.
        needed = self.peaks[name, pass_] or peers.needed_bytes(name, self.shape, pass_)
        if pass_ == "backward":
            needed = max(needed, peers.needed_bytes(name, self.shape, "end_to_end"))
        return needed > SHARE * memory.total_bytes(self.device)

    def _fail(
        self, name: str, passes: Sequence[str], error: Exception, warned: Sequence[str] = ()
    ) -> None:
        """Store rows without a time for ``passes`` of ``name``, which are measured no further."""
        if failures.is_lost(error):
            passes = self._left(name)
        for pass_ in passes:
            self.peaks.pop((name, pass_), None)
        self.job.fail(error, (self.shape.key(name, pass_) for pass_ in passes), warned)
        free_memory(self.device)

    def _reset(self) -> None:
        """Forget compiled code and tensors: Dynamo compiles a limited number of shapes."""
        import torch

        self.forwards.clear()
        self.peaks.clear()
        self.qkv = self.do = self.first = None
        if any(name in peers.COMPILED for name in self.job.wanted):
            torch._dynamo.reset()
        free_memory(self.device)


def _tried(step: Callable[[], object]) -> Exception | None:
    """What a ``step`` raised, which holds no tensors of its frames."""
    try:
        step()
    except Exception as error:
        return failures.detached(error)
    return None
