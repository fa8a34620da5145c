"""Eager and compiled attention at one shape, in one process: what a worker does for a task.

The compiled one is first compiled twice, from an empty cache and from a full one, its forward and
its backward apart: Inductor compiles a backward when it is first run. Then results are checked; a
wrong one is an ``error`` row, never a time. Timing comes last and pass by pass, in turns, so that a
drifting clock reaches both alike.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from a2lib.experiments.compile import PASSES, Shape
from a2lib.experiments.flash import peers, sanity
from a2lib.experiments.flash.comparison import TIMING
from a2lib.experiments.harness.worker import Job, Row
from a2lib.experiments.passes import in_turns, inputs, one_pass
from a2lib.measure import COMPILE_ATTENTION, failures, inductor, peak_bytes, synchronize

prepare = peers.configure


def measure(job: Job) -> None:
    """The wanted implementations at one shape: in turns, or each by itself."""
    if job.would_swap(Shape(**job.spec["shape"]).needed_bytes()):
        return
    inductor.prime(job.device)
    for group in job.groups():
        _Comparison(job, group).run()


class _Comparison:
    def __init__(self, job: Job, names: list[str]) -> None:
        self.job, self.names = job, names
        self.shape = Shape(**job.spec["shape"])
        self.causal = self.shape.written == "causal"
        self.calls: dict[str, Callable] = {}
        self.found: dict[str, dict[str, Row]] = {}
        self.timed: set[tuple[str, str]] = set()

    def run(self) -> None:
        for name in self.names:
            self.job.begin(name)
            try:
                if not self.calls:
                    self._make_inputs()
                self._prepare(name)
            except Exception as error:
                self._fail(name, failures.detached(error))
        self.expected = None
        for pass_ in PASSES:
            if self.calls:
                self._time(pass_)
        inductor.forget()

    def _make_inputs(self) -> None:
        shape = self.shape
        one_head = (1,) if shape.written == "heads" else ()
        sizes = shape.batch, *one_head, shape.seq_len, shape.head_dim
        *self.qkv, self.do = inputs(sizes, shape.dtype, self.job.device, self.job.seed)
        self.expected = sanity.Expected(*self.qkv, self.do, causal=self.causal, dtype=shape.dtype)

    def _prepare(self, name: str) -> None:
        forward = peers.reference(self.causal, compiled=name == "compile")
        found: dict[str, Row] = {pass_: {} for pass_ in PASSES}
        if name == "compile":
            forward, found = self._compile()
        self.expected.check(forward, self.qkv)
        self.calls[name], self.found[name] = forward, found
        for pass_ in PASSES:
            call = self._call(name, pass_)
            found[pass_]["peak_bytes"] = peak_bytes(call, device=self.job.device)

    def _compile(self) -> tuple[Callable, dict[str, Row]]:
        """The compiled function, and of each pass what compiling took and made."""
        found: dict[str, Row] = {pass_: {} for pass_ in PASSES}
        with inductor.empty_folder() as folder, inductor.caches_in(folder):
            with inductor.watching() as compiled:
                _, cold = self._first()
            inductor.forget()
            forward, warm = self._first()
        for pass_, row in found.items():
            mine = [graph for graph in compiled if graph.backward == (pass_ == "backward")]
            row |= {"ms_cold": cold[pass_], "ms_warm": warm[pass_], **counts(mine)}
        return forward, found

    def _first(self) -> tuple[Callable, dict[str, float]]:
        """A newly compiled function, and the ms of its first forward and backward."""
        forward = peers.reference(self.causal, compiled=True)
        start = self._now()
        o = forward(*self.qkv)
        middle = self._now()
        torch.autograd.grad(o, self.qkv, self.do)
        return forward, {"forward": middle - start, "backward": self._now() - middle}

    def _now(self) -> float:
        synchronize(self.job.device)
        return 1e3 * time.perf_counter()

    def _call(self, name: str, pass_: str, *, anew: bool = False) -> Callable[[], object]:
        return one_pass(self.calls[name], self.qkv, self.do, pass_, anew=anew)

    def _time(self, pass_: str) -> None:
        device, names = self.job.device, list(self.calls)
        self.job.begin(names[0] if len(names) == 1 else None)
        makers = {name: functools.partial(self._call, name, pass_) for name in names}
        results, usable = in_turns(makers, COMPILE_ATTENTION, device, **TIMING[device])
        for name, result in results.items():
            if isinstance(result, Exception):
                self._fail(name, result)
                continue
            self.timed.add((name, pass_))
            known = launched(makers[name]) if device == "cuda" and usable else {}
            notes = filter(None, (one.get("note") for one in (known, result)))
            row = self._key(name, pass_) | {"status": "ok"} | self.found[name][pass_]
            row |= known | result | {"note": failures.note("; ".join(notes))}
            self.job.put(row)
        if not usable:
            raise failures.LostContext("a failed CUDA graph")

    def _key(self, name: str, pass_: str) -> Row:
        return next(key for key in self.shape.keys()[name] if key["pass"] == pass_)

    def _fail(self, name: str, error: Exception) -> None:
        """Rows without a time for what is left of ``name``, which is measured no further."""
        self.calls.pop(name, None)
        left = [key for key in self.job.wanted[name] if (name, key["pass"]) not in self.timed]
        self.job.fail(error, left)


def counts(compiled: list[inductor.Graph], times: int = 1) -> Row:
    """The columns of what Inductor made in these graphs, each called ``times`` times."""
    if not compiled:
        return {}
    known = [graph.bytes for graph in compiled if graph.bytes is not None]
    return {
        "kernels_written": sum(graph.written for graph in compiled),
        "kernels_called": times * sum(graph.called for graph in compiled),
        "library_calls": times * sum(graph.library for graph in compiled),
        "attentions": times * sum(graph.attentions for graph in compiled),
        "moved_bytes": times * sum(known) if len(known) == len(compiled) else None,
    }


def launched(make: Callable[[], Callable]) -> Row:
    """``launches`` of the call ``make()``, or the ``note`` why they are not known: its time counts
    even so."""
    try:
        return {"launches": inductor.launches(make())}
    except Exception as error:
        return {"note": f"no profile: {failures.classify(error)[1]}"}
