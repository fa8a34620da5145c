"""Several implementations of attention in one process: each made ready, then timed pass by pass.

What is made ready is right: a wrong result is an `error` row, never a time. All forwards are timed
in turns, then all backwards, so that a drifting clock reaches all alike.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from a2lib.attention import sanity
from a2lib.experiments.harness.worker import Job, Row, free_memory
from a2lib.lab import Section, Timing, failures, graphs, timing

TIMING = {
    "cuda": {"warmup_ms": 20, "rep_ms": 150, "min_n": 5, "max_n": 300},
    "cpu": {"warmup_ms": 10, "rep_ms": 200, "min_n": 1, "max_n": 200},
}


class Turns:
    """The wanted passes of the culprits ``names`` (of all) at ``shape``, of which ``sizes``,
    ``dtype`` and ``causal`` are used. ``prepare(name)`` puts into ``forwards`` what ``call`` makes
    a pass of."""

    section: Section
    passes: Sequence[str]

    def __init__(self, job: Job, shape, names: Iterable[str] | None = None) -> None:
        self.job, self.device, self.shape = job, job.device, shape
        self.names = list(job.wanted if names is None else names)
        # The keys of what is still to be timed.
        self.left = {(name, key["pass"]): key for name in self.names for key in job.wanted[name]}
        self.forwards: dict[str, Callable] = {}
        # What is known of a pass beside its times.
        self.known: dict[tuple[str, str], Row] = {}
        self.expected: sanity.Expected | None = None

    def run(self) -> None:
        """Measure, every outcome a row. Raises failures.LostContext, the rows stored, where the
        device has to be reset."""
        for name in self.names:
            if self.job.expired():
                break
            self.job.begin(name)
            with warnings.catch_warnings(record=True, action="always") as caught:
                failed = tried(partial(self._ready, name))
            if failed:
                self.fail(name, failed, warned=[str(w.message) for w in caught])
        self.expected = None
        for pass_ in self.passes:
            ready = [name for name in self.forwards if (name, pass_) in self.left]
            for group in self.groups(ready, pass_):
                self.time(group, pass_)

    def _ready(self, name: str) -> None:
        if self.expected is None:
            *self.qkv, self.do = inputs(self.shape, self.device, self.job.seed)
            how = {"causal": self.shape.causal, "dtype": self.shape.dtype}
            self.expected = sanity.Expected(*self.qkv, self.do, **how)
        self.prepare(name)

    def call(self, name: str, pass_: str, *, anew: bool = False) -> Callable[[], object]:
        return one_pass(self.forwards[name], self.qkv, self.do, pass_, anew=anew)

    def passes_of(self, name: str) -> list[str]:
        """Those still to be timed."""
        return [pass_ for pass_ in self.passes if (name, pass_) in self.left]

    def groups(self, names: list[str], pass_: str) -> list[list[str]]:
        """Who takes turns in ``pass_``: all, or each is alone."""
        return [names] if self.job.in_turns and names else [[name] for name in names]

    def time(self, names: list[str], pass_: str) -> None:
        self.job.begin(None if len(names) > 1 else names[0])
        results, usable = self.timed({name: partial(self.call, name, pass_) for name in names})
        rows = []
        for name, result in results.items():
            if isinstance(result, Exception):
                self.fail(name, result, [pass_])
            else:
                key = self.left.pop((name, pass_))
                known = {"status": "ok", "note": ""} | self.known.get((name, pass_), {})
                rows.append(key | known | self.values(name, pass_, result, usable))
        self.job.put(*rows)
        if not usable:
            raise failures.LostContext("a failed CUDA graph")

    def timed(self, makers: Mapping[str, Callable]) -> tuple[dict[str, Row | Exception], bool]:
        """The times of each call, or what it raised; and whether the device is usable: if not,
        those not come to are missing.

        Called by the host, then on a GPU replayed, from ``makers[name](anew=True)``. Raises
        LostContext where one of several has spoilt the device for all: no row may blame the wrong
        one.
        """
        calls: dict[str, Callable] = {}
        results: dict[str, Timing | Exception] = {}
        for name, make in makers.items():
            try:
                calls[name] = make()
            except Exception as error:
                results[name] = failures.detached(error)
        try:
            if calls:
                how = TIMING[self.device]
                results |= timing.time_many(calls, device=self.device, **how)
        except Exception as error:  # of the clock itself
            results |= dict.fromkeys(calls, failures.detached(error))
        calls.clear()
        failed = {name: one for name, one in results.items() if isinstance(one, Exception)}
        if len(makers) > 1 and any(map(failures.is_lost, failed.values())):
            raise failures.LostContext("while several took turns")
        timed = {name: one for name, one in results.items() if name not in failed}
        replays, usable = dict.fromkeys(timed, {}), True
        if timed and self.device == "cuda":
            anew = {name: partial(makers[name], anew=True) for name in timed}
            replays, usable = replayed(anew, {name: one.ms for name, one in timed.items()})
        return {n: timed[n].row(self.section) | row for n, row in replays.items()} | failed, usable

    def values(self, name: str, pass_: str, times: Row, usable: bool) -> Row:
        """``times``, with what is looked at after them."""
        return times

    def fail(
        self,
        name: str,
        error: Exception,
        passes: Sequence[str] | None = None,
        warned: Sequence[str] = (),
    ) -> None:
        """Rows without a time for ``passes`` of ``name``, or all that are left, which are measured
        no further."""
        if passes is None or failures.is_lost(error):
            passes = self.passes_of(name)
        self.job.fail(error, [self.left.pop((name, pass_)) for pass_ in passes], warned)
        free_memory(self.device)


def inputs(shape, device: str, seed: int) -> tuple:
    """Return q, k, v (leaves that require grad) and do, of ``shape.sizes``, normal."""
    import torch

    options = random(shape.dtype, device, seed)
    *qkv, do = (torch.randn(shape.sizes, **options) for _ in range(4))
    return (*(x.requires_grad_() for x in qkv), do)


def tried(step: Callable[[], object]) -> Exception | None:
    """What a ``step`` raised, which holds no tensors of its frames."""
    try:
        step()
    except Exception as error:
        return failures.detached(error)
    return None


def random(dtype: str, device: str, seed: int) -> dict[str, object]:
    """What ``torch.randn`` is given beside the sizes, the same for all tensors of a shape."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    generator = torch.Generator(device).manual_seed(seed)
    return {"device": device, "dtype": dtypes[dtype], "generator": generator}


def one_pass(
    forward: Callable, qkv: Sequence, do: object, pass_: str, *, anew: bool = False
) -> Callable[[], object]:
    """ "forward", "backward" or both ("end_to_end") of ``forward(q, k, v)`` as a call without
    arguments; the graph of a backward alone is made here, and kept.

    With ``anew`` its leaves are its own: autograd hands a leaf its gradient on the stream that
    first used it, and work on another than the captured stream ends a capture.
    """
    import torch

    if anew:
        qkv = [x.detach().requires_grad_() for x in qkv]
    if pass_ == "forward":
        return lambda: forward(*qkv)
    if pass_ == "end_to_end":
        return lambda: torch.autograd.grad(forward(*qkv), qkv, do)
    o = forward(*qkv)
    return lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)


def replayed(
    makers: Mapping[str, Callable], expected_ms: Mapping[str, float], **options: object
) -> tuple[dict[str, Row], bool]:
    """``ms_graph`` of each call of ``makers``, or the ``note`` why there is none, and whether the
    device is usable: if not, those not come to are missing. ``graphs.time_replays`` says how."""
    try:
        done = graphs.time_replays(makers, expected_ms, **options)
    except Exception as error:  # of the clock itself
        done = graphs.Replays(dict.fromkeys(makers, error))
    return {name: _values(result) for name, result in done.results.items()}, done.usable


def _values(result: object) -> Row:
    if isinstance(result, Exception):
        return {"note": failures.note(f"no graph: {failures.classify(result)[1]}")}
    return {"ms_graph": result.ms}
