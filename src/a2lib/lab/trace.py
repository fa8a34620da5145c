"""What a GPU did in some steps: the kernels of a trace, each with the ranges that launched it.

    trace = from_profiler(profiler)            # a torch.profiler.profile that is over
    trace = from_nsys("report.sqlite")         # nsys export --type sqlite report.nsys-rep
    kernel_rows(trace.kernels)                 # calls, time, share by phase, part, kind and name
    trace.steps()["step 0"]                    # the kernels launched in a range of that name
    phase_times(trace)["step 0"]["backward"]   # the GPU's time and the host's

A kernel belongs to the ranges in which it was launched, by the launch's correlation id: when it ran
says nothing, since the host is ahead of the GPU. Backward is launched by a thread of its own while
the main one waits in the range "backward", so ranges of all threads count. On a CPU the operators
that call no other stand in the place of kernels, each its own launch.
"""

import dataclasses
import functools
import re
import sqlite3
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from a2lib.errors import OneLine
from a2lib.lab.device import synchronize
from a2lib.lab.kernel_names import COMMUNICATION, MATMUL, OTHER, kind_of, shorten

PHASES = ("forward", "loss", "backward", "optimizer")
STEP = "step"  # the whole of one
HOST = "host"  # the stream of what launches
NO_LAUNCH = "no launch"  # the phase of a kernel whose launch is not in the trace
# The range around a step.
STEP_OF = re.compile(r"step \d+")
# Ranges that libraries push for themselves, below those of the program.
OF_LIBRARIES = re.compile(r"(cub|thrust)::|Optimizer\.(step|zero_grad)#")
# Operators that make a view or take memory, and compute nothing.
NO_WORK = frozenset(
    f"aten::{name}"
    for name in """
    as_strided view _unsafe_view reshape _reshape_alias expand select slice t transpose permute
    unsqueeze squeeze detach alias split empty empty_like empty_strided resize_ unbind unflatten
    flatten to result_type item _local_scalar_dense is_nonzero lift_fresh resolve_conj resolve_neg
    narrow view_as stride
    """.split()
)
LEAST_SHARE = 0.001  # of all time: a kernel below it is filed under "rest"
ROWS = 1500
MS = 1_000_000  # nanoseconds
NEIGHBOURS_NS = 2000  # pieces of one kind and range that are no further apart are one row


class TraceError(OneLine, ValueError):
    """There is no trace, or not what is looked for; the message is one line and says why."""


@dataclass(frozen=True)
class Span:
    """A range, or a call of the host, by the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int


@dataclass
class Kernel:
    """A kernel, copy or memset. `launch` is the call that put it into its stream, None where that
    is not in the trace; `path` are the ranges around it, from the outermost on."""

    name: str
    stream: str
    start_ns: int
    end_ns: int
    launch: Span | None = None
    path: tuple[str, ...] = ()

    @functools.cached_property
    def kind(self) -> str:
        """The kind of work, one of `kernel_names.KINDS`."""
        return kind_of(self.name)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def part(self) -> str:
        """The innermost range without the block's number: "layers.3.attn.q_proj.bwd" ->
        "attn.q_proj"; a block itself is "block"."""
        innermost = (self._program_path or self.path or ("",))[-1].removesuffix(".bwd")
        inside = re.fullmatch(r"layers\.\d+(?:\.(.+))?", innermost)
        return innermost if inside is None else inside[1] or "block"

    @property
    def phase(self) -> str:
        """The innermost of `PHASES` around it, else the program's outermost range in the step."""
        if self.launch is None:
            return NO_LAUNCH
        phases = [name for name in self.path if name in PHASES]
        if phases:
            return phases[-1]
        inside = [name for name in self._program_path if not STEP_OF.fullmatch(name)]
        return (inside or self.path or ("",))[0]

    @property
    def step(self) -> str:
        """The range around the step, "step 0" say; "" for none."""
        return next((name for name in self.path if STEP_OF.fullmatch(name)), "")

    @property
    def _program_path(self) -> list[str]:
        return [name for name in self.path if not OF_LIBRARIES.match(name)]


@dataclass(frozen=True)
class Trace:
    """`kernels` in order of start, `ranges`, and `waits`, the host's calls that wait for a device.
    `source` is "nsys", "torch" or "torch, cpu"; `notes` is what the profiler had to say."""

    source: str
    kernels: list[Kernel]
    ranges: list[Span]
    waits: list[Span]
    notes: Sequence[str] = ()

    def steps(self) -> dict[str, list[Kernel]]:
        """Return the kernels of each step, in order."""
        steps: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            if kernel.step:
                steps[kernel.step].append(kernel)
        return dict(steps)


def from_profiler(profiler) -> Trace:
    """Return the trace of a `torch.profiler.profile` whose context is left."""
    from torch.autograd import DeviceType

    def span(event) -> Span:
        start, end = event.time_range.start, event.time_range.end
        return Span(event.name, round(1000 * start), round(1000 * end))

    events = profiler.events()
    ranges = [e for e in events if e.is_user_annotation and e.device_type == DeviceType.CPU]
    # A range is on the device once more, as long as its kernels.
    others = [e for e in events if not e.is_user_annotation]
    on_host = [e for e in others if e.device_type == DeviceType.CPU]
    # Operators have correlation ids of their own, which a call of CUDA may have too.
    calls = {e.id: span(e) for e in on_host if e.name.startswith("cu")}
    waits = [call for call in calls.values() if "Synchronize" in call.name]
    kernels = []
    for event in others:
        if event.device_type != DeviceType.CPU:
            ran = span(event)
            stream, launch = str(event.device_resource_id), calls.get(event.id)
            kernels.append(Kernel(ran.name, stream, ran.start_ns, ran.end_ns, launch))
    source = "torch"
    if not kernels:
        source = "torch, cpu"
        for event in on_host:
            if event.name.startswith("aten::") and _computes_itself(event):
                ran = span(event)
                kernels.append(Kernel(ran.name, str(event.thread), ran.start_ns, ran.end_ns, ran))
    return _complete(Trace(source, kernels, [span(e) for e in ranges], waits))


def _computes_itself(operator) -> bool:
    """Return whether an operator computes, and calls none that does."""
    return operator.name not in NO_WORK and not any(
        child.name not in NO_WORK for child in operator.cpu_children
    )


def from_nsys(path: Path | str) -> Trace:
    """Return the trace in the SQLite export of Nsight Systems.

    `nsys stats` gives kernels by range too, but only by the range of their own thread, in which no
    kernel of a backward is. Tables as in the "SQLite Schema Reference" of Nsight Systems 2025; one
    that would be empty is not there. Raises TraceError where no kernel was traced.
    """
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as base:
        tables = {name for (name,) in base.execute("select name from sqlite_master")}

        def select(table: str, columns: str, condition: str = "true") -> list[tuple]:
            if table not in tables:
                return []
            return base.execute(f"select {columns} from {table} where {condition}").fetchall()

        words = dict(select("StringIds", "id, value"))
        # Correlation ids are numbers of one process, whose id is all but 24 bits of a thread's.
        columns = "globalTid >> 24, correlationId, nameId, start, end"
        calls = {
            (process, correlation): Span(words.get(name, ""), start, end)
            for process, correlation, name, start, end in select(
                "CUPTI_ACTIVITY_KIND_RUNTIME", columns
            )
        }
        copy = (
            "'Memcpy ' || case copyKind when 1 then 'HtoD' when 2 then 'DtoH' when 8 then 'DtoD'"
            " when 10 then 'PtoP' else copyKind end"
        )
        names = {"KERNEL": "demangledName", "MEMCPY": copy, "MEMSET": "'Memset'"}
        kernels = []
        for activity, name in names.items():
            columns = f"{name}, streamId, start, end, globalPid >> 24, correlationId"
            for word, stream, start, end, process, correlation in select(
                f"CUPTI_ACTIVITY_KIND_{activity}", columns
            ):
                launch = calls.get((process, correlation))
                kernels.append(Kernel(words.get(word, word), str(stream), start, end, launch))
        # Ranges that are pushed and popped have the type 59.
        columns, pushed = "text, textId, start, end", "eventType = 59 and end is not null"
        ranges = [
            Span(text or words.get(text_id, ""), start, end)
            for text, text_id, start, end in select("NVTX_EVENTS", columns, pushed)
        ]
        notes = [str(text) for (text,) in select("DIAGNOSTIC_EVENT", "text", "text is not null")]
    waits = [call for call in calls.values() if "Synchronize" in call.name]
    return _complete(Trace("nsys", kernels, ranges, waits, notes))


def _complete(trace: Trace) -> Trace:
    """Return the trace in order, every kernel with the path of its launch. Raises TraceError for
    one without kernels."""
    if not trace.kernels:
        raise TraceError("no kernel and no operator was traced")
    trace.kernels.sort(key=lambda kernel: (kernel.start_ns, kernel.stream))
    _file_under_ranges(trace.kernels, trace.ranges)
    return trace


def _file_under_ranges(kernels: Iterable[Kernel], ranges: Iterable[Span]) -> None:
    """Give every kernel the `path` of its launch, in one sweep over both with a stack of the ranges
    that are open."""
    waiting = sorted(ranges, key=lambda span: (-span.start_ns, span.end_ns))
    is_open: list[Span] = []
    launched = [kernel for kernel in kernels if kernel.launch is not None]
    for kernel in sorted(launched, key=lambda k: k.launch.start_ns):
        now = kernel.launch.start_ns
        while waiting and waiting[-1].start_ns <= now:
            is_open.append(waiting.pop())
        is_open = [span for span in is_open if span.end_ns > now]
        kernel.path = tuple(span.name for span in is_open)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the stretches (start, end) that at least one interval covers, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def busy_ns(kernels: Iterable[Kernel]) -> int:
    """Return how long at least one kernel ran; streams overlap, so this is no sum."""
    return sum(end - start for start, end in union((k.start_ns, k.end_ns) for k in kernels))


def span_ns(kernels: Sequence[Kernel]) -> int:
    """Return the time from the first kernel's start to the last one's end."""
    return max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)


def median_step(trace: Trace) -> list[Kernel]:
    """Return the kernels of the step whose busy time is the median one (the lower of two). Raises
    TraceError where the trace names no step."""
    steps = sorted(trace.steps().values(), key=busy_ns)
    if not steps:
        raise TraceError("the trace names no step")
    return steps[(len(steps) - 1) // 2]


@dataclass(frozen=True)
class PhaseTimes:
    """One phase of one step, or a whole one.

    A phase's kernels run after its range, since the host is ahead of the GPU: `ms` is the GPU's
    time, from the first kernel's start to the last one's end, `ms_busy` that with a kernel running;
    `ms_range` is the range's length on the host, of which it spent `ms_launching` in the calls that
    launch and `ms_waiting` in those that wait for the device. `us_queued` is the median time from
    the end of a launch to its kernel's start. The last three are 0 on a CPU.
    """

    launches: int
    ms: float
    ms_busy: float
    ms_range: float
    ms_launching: float = 0.0
    ms_waiting: float = 0.0
    us_queued: float = 0.0


def phase_times(trace: Trace) -> dict[str, dict[str, PhaseTimes]]:
    """Return the times of each phase of each step, and of the whole `STEP`."""
    times = {}
    for step, kernels in trace.steps().items():
        around = next(span for span in trace.ranges if span.name == step)
        phases = {STEP: _times(trace, kernels, [around])}
        for phase in PHASES:
            ranges = [
                span
                for span in trace.ranges
                if span.name == phase and around.start_ns <= span.start_ns < around.end_ns
            ]
            mine = [kernel for kernel in kernels if kernel.phase == phase]
            if ranges and mine:
                phases[phase] = _times(trace, mine, ranges)
        times[step] = phases
    return times


def _times(trace: Trace, kernels: list[Kernel], ranges: list[Span]) -> PhaseTimes:
    times = PhaseTimes(
        launches=len(kernels),
        ms=span_ns(kernels) / 1e6,
        ms_busy=busy_ns(kernels) / 1e6,
        ms_range=sum(span.end_ns - span.start_ns for span in ranges) / 1e6,
    )
    if trace.source.endswith("cpu"):
        return times
    launched = [kernel for kernel in kernels if kernel.launch is not None]
    # A replayed graph is one launch of many kernels.
    launches = {kernel.launch for kernel in launched}
    queued = [max(0, kernel.start_ns - kernel.launch.end_ns) for kernel in launched]
    waits = [
        wait
        for wait in trace.waits
        if any(span.start_ns <= wait.start_ns < span.end_ns for span in ranges)
    ]
    return dataclasses.replace(
        times,
        ms_launching=sum(call.end_ns - call.start_ns for call in launches) / 1e6,
        ms_waiting=sum(wait.end_ns - wait.start_ns for wait in waits) / 1e6,
        us_queued=statistics.median(queued) / 1e3 if queued else 0.0,
    )


def unfiled_percent(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return shares of kernel time in percent, by column of a row: without a launch, launched
    outside of any range, of a name that no rule knows."""
    everything = sum(kernel.duration_ns for kernel in kernels) or 1

    def percent(chosen: Iterable[Kernel]) -> float:
        return 100 * sum(kernel.duration_ns for kernel in chosen) / everything

    launched = [kernel for kernel in kernels if kernel.launch is not None]
    return {
        "no_launch_percent": percent(kernel for kernel in kernels if kernel.launch is None),
        "no_range_percent": percent(kernel for kernel in launched if not kernel.path),
        "no_class_percent": percent(kernel for kernel in kernels if kernel.kind == OTHER),
    }


def kernel_rows(kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """Return rows of the bulk table `kernels`: phase, part, kind, kernel, calls, ms, median_us,
    share; the longest first.

    A kernel below `LEAST_SHARE` of all time is filed under "rest" of its phase, part and kind, so
    that the sums stay exact.
    """
    by_name: Counter[str] = Counter()
    for kernel in kernels:
        by_name[kernel.name] += kernel.duration_ns
    everything = by_name.total() or 1
    groups: dict[tuple, list[int]] = defaultdict(list)
    for kernel in kernels:
        is_rest = by_name[kernel.name] / everything < LEAST_SHARE
        name = "rest" if is_rest else shorten(kernel.name)
        groups[kernel.phase, kernel.part, kernel.kind, name].append(kernel.duration_ns)
    rows = []
    for (phase, part, kind, name), ns in groups.items():
        row = {"phase": phase, "part": part, "kind": kind, "kernel": name, "calls": len(ns)}
        row["ms"] = sum(ns) / 1e6
        row["median_us"] = statistics.median(ns) / 1e3
        row["share"] = sum(ns) / everything
        rows.append(row)
    return sorted(rows, key=lambda row: -row["ms"])


def strip_rows(
    kernels: Iterable[Kernel], start_ns: int, length_ns: int, most: int = ROWS
) -> list[dict[str, object]]:
    """Return rows of the bulk table `strip`: start_us and duration_us in the window, stream, kind,
    phase, part; launches are rows of the stream "host".

    The window begins at `start_ns` of the trace. Neighbours on a stream with equal kind, phase and
    part are one row where the gap is small; if there are still more than `most`, it ends earlier.
    """
    pieces = []
    for kernel in kernels:
        pieces.append((kernel.start_ns, kernel.end_ns, kernel.stream, kernel))
        launch = kernel.launch
        if launch is not None and launch.start_ns != kernel.start_ns:  # as an operator's is
            pieces.append((launch.start_ns, launch.end_ns, HOST, kernel))
    rows: list[dict] = []
    last: dict[str, dict] = {}  # of each stream, the only row that may grow
    for start, end, stream, kernel in sorted(pieces, key=lambda piece: piece[:3]):
        start, end = max(start, start_ns), min(end, start_ns + length_ns)
        if start >= end:
            continue
        what = {"stream": stream, "kind": kernel.kind, "phase": kernel.phase, "part": kernel.part}
        before = last.get(stream)
        is_same = before is not None and what.items() <= before.items()
        if is_same and start - before["end"] <= NEIGHBOURS_NS:
            before["end"] = max(before["end"], end)
            continue
        last[stream] = {"start": start, "end": end, **what}
        rows.append(last[stream])
    return [
        {
            "start_us": (row["start"] - start_ns) / 1e3,
            "duration_us": (row["end"] - row["start"]) / 1e3,
            "stream": row["stream"],
            "kind": row["kind"],
            "phase": row["phase"],
            "part": row["part"],
        }
        for row in rows[:most]
    ]


def block_windows(trace: Trace, step: Sequence[Kernel], layers: int) -> dict[str, list[dict]]:
    """Return strips of the block in the middle of a step of so many: phase -> rows, for forward and
    backward.

    It is found by its range. Where blocks have none, since they are compiled, the window is one of
    `layers` equal parts, in the middle of the phase.
    """
    windows = {}
    for phase, suffix in (("forward", ""), ("backward", ".bwd")):
        in_phase = [kernel for kernel in step if kernel.phase == phase]
        if not in_phase:
            continue
        block = f"layers.{layers // 2}{suffix}"
        in_block = [kernel for kernel in in_phase if block in kernel.path]
        start = min(kernel.start_ns for kernel in in_block or in_phase)
        length = span_ns(in_block or in_phase)
        if not in_block:
            length //= layers
            start += (layers // 2) * length
        if rows := strip_rows(trace.kernels, start, length):
            windows[phase] = rows
    return windows


def record(step: Callable, device: str, steps: int = 2) -> Trace | None:
    """Take steps on every rank, each as `step(phase)`; return rank 0's trace of them, None on the
    other ranks."""
    import torch
    import torch.distributed as dist

    here = dist.get_rank() == 0
    profiler = torch.profiler.profile() if here else None
    with profiler or nullcontext():
        for _ in range(steps):
            step(torch.profiler.record_function if here else nullcontext)
        synchronize(device)
    return from_profiler(profiler) if here else None


def around_end_of_backward(trace: Trace, captured: bool = False) -> list[dict[str, object]]:
    """Return the strip of 15 ms before and after the end of the last backward, without launches. Of
    a step that is `captured` no phase is known: it ends with the last product then. Raises
    TraceError where there is no backward."""
    if captured:
        backward = [kernel for kernel in trace.kernels if kernel.kind == MATMUL]
    else:
        backward = _last_backward(trace)
    if not backward:
        raise TraceError("no kernel of a backward was traced")
    return _device_strip(trace, max(kernel.end_ns for kernel in backward), 15 * MS)


def around_begin_of_backward(trace: Trace) -> list[dict[str, object]]:
    """Return the strip of 12 ms before and after the begin of the last backward, without launches.
    Raises TraceError where there is none."""
    backward = _last_backward(trace)
    if not backward:
        raise TraceError("no kernel of a backward was traced")
    return _device_strip(trace, min(kernel.start_ns for kernel in backward), 12 * MS)


def _last_backward(trace: Trace) -> list[Kernel]:
    """Return what the last step computes in backward."""
    starts = [span.start_ns for span in trace.ranges if span.name == "backward"]
    last = []
    for kernel in trace.kernels:
        is_computing = kernel.phase == "backward" and kernel.kind != COMMUNICATION
        if is_computing and kernel.launch.start_ns >= max(starts):
            last.append(kernel)
    return last


def _device_strip(trace: Trace, middle_ns: int, half_ns: int) -> list[dict[str, object]]:
    rows = strip_rows(trace.kernels, middle_ns - half_ns, 2 * half_ns, most=100 * ROWS)
    return [row for row in rows if row["stream"] != HOST][:ROWS]
