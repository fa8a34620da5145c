"""Each phase of each step of a trace: how long the GPU was at it, and what the host did meanwhile.

    for step, phases in phase_times(read("report.sqlite")).items():
        phases["forward"].span_ns, phases["step"].range_ns

A phase's kernels run after its range: the host pushes and pops the range while it launches, and is
ahead of the GPU by as much as it can. So the range's length is the host's time, and the time from
the first kernel's start to the last one's end is the GPU's; where they differ, neither is wrong.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.measure.trace.kernels import PHASES, Kernel, Launch, Span, Trace
from a2lib.measure.trace.summary import busy

STEP = "step"  # the whole of one


@dataclass(frozen=True)
class PhaseTimes:
    """Nanoseconds of one phase of one step.

    ``span_ns`` runs from its first kernel's start to its last one's end, ``busy_ns`` is how long at
    least one of them ran. ``range_ns`` is the length of its range on the host, of which
    ``launching_ns`` was spent in the calls that launch and ``waiting_ns`` in those that wait for
    the device. ``queued_ns`` is the median time from the end of a launch to its kernel's start: how
    far the host is ahead. The last three are 0 where there are no kernels but operators.
    """

    kernels: int
    span_ns: int
    busy_ns: int
    range_ns: int
    launching_ns: int
    waiting_ns: int
    queued_ns: float


def phase_times(trace: Trace) -> dict[str, dict[str, PhaseTimes]]:
    """Step -> phase -> its times, and those of the whole ``STEP``; {} where no step is named."""
    on_cpu = trace.source == "chrome, cpu"
    found = {}
    for step, kernels in trace.steps().items():
        (around, *_) = [span for span in trace.spans if span.name == step]
        phases = {}
        for phase in (*PHASES, STEP):
            if phase == STEP:
                mine, ranges = kernels, [around]
            else:
                mine = [k for k in kernels if k.phase == phase]
                ranges = [s for s in trace.spans if s.name == phase and _inside(s, around)]
            if mine and ranges:
                phases[phase] = _times(mine, ranges, () if on_cpu else trace.waits, on_cpu)
        found[step] = phases
    return found


def _times(
    kernels: list[Kernel], ranges: list[Span], waits: Iterable[Launch], on_cpu: bool
) -> PhaseTimes:
    work = busy(kernels)
    # A replayed graph is one launch of many kernels.
    launches = set() if on_cpu else {k.launch for k in kernels if k.launch is not None}
    queued = [
        max(0, k.start_ns - k.launch.start_ns - k.launch.duration_ns)
        for k in kernels
        if k.launch in launches
    ]
    waited = [w for w in waits for r in ranges if r.start_ns <= w.start_ns < r.end_ns]
    return PhaseTimes(
        kernels=len(kernels),
        span_ns=work.span_ns,
        busy_ns=work.busy_ns,
        range_ns=sum(r.end_ns - r.start_ns for r in ranges),
        launching_ns=sum(launch.duration_ns for launch in launches),
        waiting_ns=sum(w.duration_ns for w in waited),
        queued_ns=statistics.median(queued) if queued else 0,
    )


def _inside(span: Span, around: Span) -> bool:
    same = span.thread == around.thread
    return same and around.start_ns <= span.start_ns and span.end_ns <= around.end_ns
