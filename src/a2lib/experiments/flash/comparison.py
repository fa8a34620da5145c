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
import gc
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from a2lib.experiments.flash import host_memory, peers, sanity
from a2lib.experiments.flash.shapes import Shape, needed_bytes
from a2lib.measure import FLASH, Timing, failures, memory
from a2lib.theory.attention import PASSES

SHARE = 0.04
TIMING = {
    "cuda": {"warmup_ms": 20, "rep_ms": 150, "min_n": 5, "max_n": 300},
    "cpu": {"warmup_ms": 10, "rep_ms": 200, "min_n": 1, "max_n": 200},
}
# On a CPU a forward that takes longer is not repeated: the time of one call is the row's.
SLOW_S = 1.0

Row = dict[str, object]
Wanted = Mapping[str, tuple[str, ...]]  # implementation -> passes


@dataclass
class Comparison:
    """One shape on one device, "cuda" or "cpu". ``run()`` sends each row of ``wanted`` to ``put``.

    ``announce(implementation)`` is called before something that could take the process down is run,
    with None where several take turns. ``expired()`` tells that no further implementation should be
    started; what has been started is measured. With ``in_turns=False`` each is timed alone.
    """

    shape: Shape
    wanted: Wanted
    device: str
    put: Callable[[Row], None]
    announce: Callable[[str | None], None] = lambda implementation: None
    expired: Callable[[], bool] = lambda: False
    in_turns: bool = True
    seed: int = 0
    timing: Mapping[str, float] | None = None
    _ready: dict[tuple[str, str], int | None] = field(default_factory=dict)
    _forwards: dict[str, Callable] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Measure. Raises failures.LostContext, its row stored, where the device has to be reset;
        an exception of ``put`` passes through."""
        self._reset()
        candidates = [name for name in self.wanted if not self._ruled_out(name)]
        if not candidates:
            return
        try:
            self.q, self.k, self.v, self.do = peers.inputs(self.shape, self.device, self.seed)
            self.expected = sanity.Expected(
                self.q, self.k, self.v, self.do, causal=self.shape.causal, dtype=self.shape.dtype
            )
        except Exception as error:
            outcome = _outcome(error)
        else:
            outcome = None
        if outcome:
            for name in candidates:
                self._fail(name, self.wanted[name], outcome)
            return
        for name in candidates:
            if self.expired():
                break
            self.announce(name)
            self._prepare(name)
        del self.expected
        for pass_ in PASSES:
            self._time(pass_)
        self._reset()

    def _ruled_out(self, name: str) -> bool:
        """Store the rows that need no trial; whether no pass is left to try."""
        reason = peers.unsupported(name, self.device)
        if reason:
            self._fail(name, self.wanted[name], ("unsupported", reason, False))
            return True
        if self.device == "cpu":
            # Trying would get the process killed, or the machine to swap, where a GPU only refuses.
            available = memory.available_bytes()
            for pass_ in self.wanted[name]:
                needed = host_memory.host_bytes(name, self.shape, pass_)
                if needed > available:
                    text = (
                        f"not run: needs about {needed / 2**30:.3g} GiB,"
                        f" {available / 2**30:.3g} GiB available (computed)"
                    )
                    self._fail(name, (pass_,), ("oom", text, False))
                else:
                    self._ready[name, pass_] = None
            return not any((name, pass_) in self._ready for pass_ in self.wanted[name])
        self._ready.update({(name, pass_): None for pass_ in self.wanted[name]})
        return False

    def _prepare(self, name: str) -> None:
        """Build, check, and read the peak memory of one implementation."""
        wanted = tuple(p for p in PASSES if (name, p) in self._ready)
        with_grad = tuple(p for p in wanted if p != "forward")
        o = gradient = gradients = outcome = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                forward = peers.build(name, self.shape, self.device)
                started = time.perf_counter()
                o = forward(*self._qkv())
                self._seconds[name] = time.perf_counter() - started
                self.expected.check_output(o.detach())
            except Exception as error:
                outcome = _outcome(error, [str(w.message) for w in caught])
        if outcome:
            o = None
            self._fail(name, wanted, outcome)
            return
        self._forwards[name] = forward
        if with_grad:
            try:
                self.expected.check_gradients(*_gradients(o, self._qkv(), self.expected.do))
                o = None
                if not self._is_slow(name):
                    gradients = self._call(name, "end_to_end")()
                    for which, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
                        sanity.check_finite(which, gradient)
            except Exception as error:
                outcome = _outcome(error)
            o = gradient = gradients = None
            if outcome:
                self._fail(name, with_grad, outcome)
        o = None
        for pass_ in wanted if self.device == "cuda" else ():
            if (name, pass_) in self._ready:
                self._peak(name, pass_)

    def _peak(self, name: str, pass_: str) -> None:
        from a2lib.measure import peak_bytes

        call = outcome = None
        try:
            call = self._call(name, pass_)
            self._ready[name, pass_] = peak_bytes(call)
        except Exception as error:
            outcome = _outcome(error)
        call = None
        if outcome:
            self._fail(name, (pass_,), outcome)

    def _time(self, pass_: str) -> None:
        names = [name for name, p in self._ready if p == pass_ and name in self._forwards]
        together = [
            name
            for name in names
            if self.in_turns and not self._is_slow(name) and not self._is_large(name, pass_)
        ]
        alone = [name for name in names if name not in together]
        for group in [together] if len(together) > 1 else [[n] for n in together]:
            self.announce(group[0] if len(group) == 1 else None)
            self._time_group(group, pass_)
        for name in alone:
            self.announce(name)
            self._free()
            self._time_group([name], pass_)
            self._free()

    def _time_group(self, names: list[str], pass_: str) -> None:
        from a2lib.measure.clock import CpuClock
        from a2lib.measure.timing import time_many

        calls: dict[str, Callable] = {}
        outcomes: dict[str, tuple] = {}
        results = {}
        for name in names:
            try:
                calls[name] = self._call(name, pass_)
            except Exception as error:
                outcomes[name] = _outcome(error)
        try:
            if len(calls) == 1 and self._is_slow(names[0]):
                results = {names[0]: Timing.of(CpuClock().samples(calls[names[0]], 1))}
            elif calls:
                settings = self.timing or TIMING[self.device]
                results = time_many(calls, device=self.device, **settings)
        except Exception as error:
            outcomes |= dict.fromkeys(calls, _outcome(error))
        calls.clear()
        for name, result in results.items():
            if isinstance(result, Exception):
                outcomes[name] = _outcome(result)
        if len(names) > 1 and any(lost for _, _, lost in outcomes.values()):
            # One of them did it and the others only saw it: no row may blame the wrong one.
            raise failures.LostContext("while several implementations took turns")
        timed = {name: result for name, result in results.items() if name not in outcomes}
        replays, usable = self._replay(timed, pass_)
        for name, values in replays.items():
            row = self.shape.key(name, pass_) | {"peak_bytes": self._ready[name, pass_]}
            self.put(row | {"status": "ok"} | timed[name].row(FLASH) | values)
        for name, outcome in outcomes.items():
            self._fail(name, (pass_,), outcome)
        if not usable:
            raise failures.LostContext("a failed CUDA graph")

    def _replay(self, timed: Mapping[str, Timing], pass_: str) -> tuple[dict[str, Row], bool]:
        """``ms_graph`` and ``note`` of each that was ``timed``, and whether the device is usable:
        if not, those not come to are missing."""
        if self.device == "cpu" or not timed:
            return dict.fromkeys(timed, {"note": ""}), True
        from a2lib.measure import graphs

        makers = {name: functools.partial(self._call, name, pass_, anew=True) for name in timed}
        try:
            done = graphs.time_replays(makers, {name: t.ms for name, t in timed.items()})
        except Exception as error:  # of the clock itself
            done = graphs.Replays(dict.fromkeys(timed, error))
        return {name: graph_values(r) for name, r in done.results.items()}, done.usable

    def _call(self, name: str, pass_: str, *, anew: bool = False) -> Callable[[], object]:
        """One pass as a call without arguments; what it should not time is done here.

        With ``anew`` its leaves are its own: autograd hands a leaf its gradient on the stream that
        first used it, and work on another than the captured stream ends a capture.
        """
        forward, do = self._forwards[name], self.do
        qkv = self._qkv()
        if anew:
            qkv = tuple(x.detach().requires_grad_() for x in qkv)
        if pass_ == "forward":
            return lambda: forward(*qkv)
        if pass_ == "end_to_end":
            return lambda: _gradients(forward(*qkv), qkv, do)
        o = forward(*qkv)
        return lambda: _gradients(o, qkv, do, retain_graph=True)

    def _qkv(self) -> tuple:
        return self.q, self.k, self.v

    def _is_slow(self, name: str) -> bool:
        """Whether one call is all there is time for. A first call that compiled tells nothing."""
        if self.device == "cuda" or name in peers.COMPILED:
            return False
        return self._seconds[name] > SLOW_S

    def _is_large(self, name: str, pass_: str) -> bool:
        # A held graph keeps about what a forward leaves behind, which end_to_end's estimate bounds.
        needed = self._ready[name, pass_] or needed_bytes(name, self.shape, pass_)
        if pass_ == "backward":
            needed = max(needed, needed_bytes(name, self.shape, "end_to_end"))
        return needed > SHARE * memory.total_bytes(self.device)

    def _fail(self, name: str, passes: tuple[str, ...], outcome: tuple[str, str, bool]) -> None:
        """Store rows without a time for ``passes`` of ``name``, which are measured no further."""
        status, note, lost = outcome
        if lost:
            passes += tuple(p for p in PASSES if (name, p) in self._ready and p not in passes)
        for pass_ in passes:
            self._ready.pop((name, pass_), None)
            self.put(self.shape.key(name, pass_) | {"status": status, "note": failures.note(note)})
        if lost:
            raise failures.LostContext(note)
        if status == "oom":
            self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _reset(self) -> None:
        """Forget compiled code and tensors: Dynamo compiles a limited number of shapes."""
        import torch

        self._forwards.clear()
        self._ready.clear()
        self.q = self.k = self.v = self.do = None
        if any(name in peers.COMPILED for name in self.wanted):
            torch._dynamo.reset()
        self._free()


def _gradients(o, qkv, do, *, retain_graph: bool = False) -> tuple:
    import torch

    return torch.autograd.grad(o, qkv, do, retain_graph=retain_graph)


def graph_values(result: Timing | Exception) -> Row:
    """``ms_graph`` and ``note`` of a row out of what ``graphs.time_replays`` has for it."""
    if not isinstance(result, Exception):
        return {"ms_graph": result.ms, "note": ""}
    return {"note": failures.note(f"no graph: {failures.classify(result)[1]}")}


def _outcome(error: Exception, warned=()) -> tuple[str, str, bool]:
    """Status, note, and whether the device is lost."""
    return (*failures.classify(error, warned), failures.is_lost(error))
