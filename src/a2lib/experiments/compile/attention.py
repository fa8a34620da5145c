"""Eager and compiled attention at one shape, in one process: what a worker does for a task.

The compiled one is first compiled twice, from an empty cache and from a full one, its forward and
its backward apart: Inductor compiles a backward when it is first run. Then results are checked; a
wrong one is an ``error`` row, never a time. Timing comes last and pass by pass.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from a2lib.attention import attention_reference
from a2lib.experiments.compile import PASSES, Shape
from a2lib.experiments.compile.turns import Turns
from a2lib.experiments.harness.worker import Job, Row
from a2lib.lab import COMPILE_ATTENTION, failures, inductor, peak_bytes, synchronize
from a2lib.theory.eager import Eager

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

prepare = inductor.configure


def measure(job: Job) -> None:
    """The wanted implementations at one shape: in turns, or each by itself."""
    shape = Shape(**job.spec["shape"])
    sizes = shape.batch, shape.seq_len, shape.head_dim
    if job.would_swap(Eager(*sizes, shape.causal, ELEMENT_BYTES[shape.dtype]).total("backward")):
        return
    inductor.prime(job.device)
    for group in job.groups():
        _Comparison(job, shape, group).run()
        inductor.forget()


class _Comparison(Turns):
    section, passes = COMPILE_ATTENTION, PASSES

    def prepare(self, name: str) -> None:
        forward = reference(self.shape.causal, compiled=name == "compile")
        found: dict[str, Row] = {pass_: {} for pass_ in PASSES}
        if name == "compile":
            forward, found = self._compile()
        self.expected.check(forward, self.qkv)
        self.forwards[name] = forward
        for pass_, row in found.items():
            row["peak_bytes"] = peak_bytes(self.call(name, pass_), device=self.device)
            self.known[name, pass_] = row

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
        forward = reference(self.shape.causal, compiled=True)
        start = self._now()
        o = forward(*self.qkv)
        middle = self._now()
        torch.autograd.grad(o, self.qkv, self.do)
        return forward, {"forward": middle - start, "backward": self._now() - middle}

    def _now(self) -> float:
        synchronize(self.device)
        return 1e3 * time.perf_counter()

    def values(self, name: str, pass_: str, times: Row, usable: bool) -> Row:
        make = partial(self.call, name, pass_)
        more = launched(make) if self.device == "cuda" and usable else {}
        notes = filter(None, (one.get("note") for one in (more, times)))
        return more | times | {"note": failures.note("; ".join(notes))}


def reference(causal: bool, *, compiled: bool) -> Callable:
    """Return the definition of attention, compiled at its first call if it is to be."""

    def forward(q, k, v):
        return attention_reference(q, k, v, is_causal=causal)

    return torch.compile(forward, dynamic=False, fullgraph=True) if compiled else forward


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
