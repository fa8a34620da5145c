"""Read what a GPU did in some steps: the kernels of a trace, each with the ranges that launched it.

    trace = from_profiler(profiler)            # a torch.profiler.profile that is over
    trace = from_nsys("report.sqlite")         # nsys export --type sqlite report.nsys-rep
    kernel_rows(trace.kernels)                 # calls, time, share by phase, part, kind and name
    trace.steps()["step 0"]                    # the kernels launched in a range of that name

A kernel belongs to the ranges in which it was launched, by the launch's correlation id: when it ran
says nothing, since the host is ahead of the GPU. Backward is launched by a thread of its own while
the main one waits in the range "backward", so ranges of all threads count. On a CPU the operators
that call no other stand in the place of kernels, each its own launch.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from a2lib.lab.kernel_names import kind_of, shorten

PHASES = ("forward", "loss", "backward", "optimizer")
HOST = "host"  # the stream of what launches
NO_LAUNCH = "no launch"  # the phase of a kernel whose launch is not in the trace
# The range around a step.
STEP_OF = re.compile(r"step \d+")
# Ranges that libraries push for themselves, below those of the program.
OF_LIBRARIES = re.compile(r"(cub|thrust)::|Optimizer\.(step|zero_grad)#")
# Operators that make a view or take memory, and compute nothing.
NO_WORK = frozenset(
    """
    as_strided view _unsafe_view reshape _reshape_alias expand select slice t transpose permute
    unsqueeze squeeze detach alias split empty empty_like empty_strided resize_ unbind unflatten
    flatten to result_type item _local_scalar_dense is_nonzero lift_fresh resolve_conj resolve_neg
    narrow view_as stride
    """.split()
)
# In Nsight Systems' export: the column that names an activity, the kinds of copies, the type of a
# range that was pushed and popped.
NSYS_NAMES = {"KERNEL": "demangledName", "MEMCPY": "copyKind", "MEMSET": "'Memset'"}
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
PUSHED = 59
LOST = re.compile("lost|drop|overflow|incomplete", re.IGNORECASE)
# Correlation ids are numbers of one process, whose id is all but 24 bits of a thread's.
PROCESS = "globalTid >> 24"
LEAST_SHARE = 0.001  # of all time: a kernel below it is filed under "rest"
ROWS = 1500
NEIGHBOURS_NS = 2000  # pieces of one kind and range that are no further apart are one row


@dataclass(frozen=True)
class Span:
    """A range, or a call of the host, by the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def is_in(self, around: Span) -> bool:
        """Return whether it begins within another."""
        return around.start_ns <= self.start_ns < around.end_ns


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
        """Return the kind of work, one of `kernel_names.KINDS`."""
        return kind_of(self.name)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def part(self) -> str:
        """Return the innermost range without the block's number: "layers.3.attn.q_proj" ->
        "attn.q_proj"; a block itself is "block"."""
        if not self.path:
            return ""
        innermost = self._program_path[-1]
        in_block = re.fullmatch(r"layers\.\d+(?:\.(.+))?", innermost)
        if in_block is None:
            return innermost
        return in_block[1] or "block"

    @property
    def phase(self) -> str:
        """The innermost of `PHASES` around it, else the program's outermost range in the step."""
        if self.launch is None:
            return NO_LAUNCH
        for name in reversed(self.path):
            if name in PHASES:
                return name
        for name in self._program_path:
            if not STEP_OF.fullmatch(name):
                return name
        return self.path[0] if self.path else ""

    @property
    def step(self) -> str:
        """Return the range around the step, "step 0" say; "" for none."""
        for name in self.path:
            if STEP_OF.fullmatch(name):
                return name
        return ""

    @property
    def _program_path(self) -> Sequence[str]:
        """Return the path less the ranges of libraries, unless there are no others."""
        of_program = [name for name in self.path if not OF_LIBRARIES.match(name)]
        return of_program or self.path


@dataclass(frozen=True)
class Trace:
    """`kernels` in order of start, and `ranges`. `source` is "nsys", "torch" or "torch, cpu"."""

    source: str
    kernels: list[Kernel]
    ranges: list[Span]

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

    ranges: list[Span] = []
    calls: dict[int, Span] = {}
    operators, on_device = [], []
    for event in profiler.events():
        is_on_host = event.device_type == DeviceType.CPU
        if event.is_user_annotation:
            # A range is on the device once more, as long as its kernels.
            if is_on_host:
                ranges.append(_span(event))
        elif not is_on_host:
            on_device.append(event)
        # Operators have correlation ids of their own, which a call of CUDA may have too.
        elif event.name.startswith("cu"):
            calls[event.id] = _span(event)
        elif event.name.startswith("aten::"):
            operators.append(event)
    kernels = []
    for event in on_device:
        ran = _span(event)
        stream = str(event.device_resource_id)
        launch = calls.get(event.id)
        kernels.append(Kernel(ran.name, stream, ran.start_ns, ran.end_ns, launch))
    if kernels:
        return _complete("torch", kernels, ranges)
    for event in operators:
        if _computes_itself(event):
            ran = _span(event)
            kernels.append(Kernel(ran.name, str(event.thread), ran.start_ns, ran.end_ns, ran))
    return _complete("torch, cpu", kernels, ranges)


def _span(event) -> Span:
    start_us, end_us = event.time_range.start, event.time_range.end
    return Span(event.name, round(1000 * start_us), round(1000 * end_us))


def _computes_itself(operator) -> bool:
    """Return whether an operator computes, and calls none that does."""
    called = [child.name.removeprefix("aten::") for child in operator.cpu_children]
    return operator.name.removeprefix("aten::") not in NO_WORK and NO_WORK.issuperset(called)


def from_nsys(path: Path | str) -> Trace:
    """Return the trace in the SQLite export of Nsight Systems.

    `nsys stats` gives kernels by range too, but only by the range of their own thread, in which no
    kernel of a backward is. Tables as in the "SQLite Schema Reference" of Nsight Systems 2025; one
    that would be empty is not there. Raises ValueError where no kernel was
    traced, or events were lost.
    """
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as base:
        for (text,) in _select(base, "DIAGNOSTIC_EVENT", "text"):
            if LOST.search(text or ""):
                raise ValueError(f"the trace is not whole: {text}")
        words = dict(_select(base, "StringIds", "id, value"))
        calls: dict[tuple[int, int], Span] = {}
        for process, correlation, name, start, end in _select(
            base, "CUPTI_ACTIVITY_KIND_RUNTIME", f"{PROCESS}, correlationId, nameId, start, end"
        ):
            calls[process, correlation] = Span(words.get(name, ""), start, end)
        kernels = []
        for activity, name_column in NSYS_NAMES.items():
            for name, stream, start, end, process, correlation in _select(
                base,
                f"CUPTI_ACTIVITY_KIND_{activity}",
                f"{name_column}, streamId, start, end, globalPid >> 24, correlationId",
            ):
                if activity == "KERNEL":
                    name = words.get(name, name)
                elif activity == "MEMCPY":
                    name = f"Memcpy {COPY_KINDS.get(name, name)}"
                launch = calls.get((process, correlation))
                kernels.append(Kernel(name, str(stream), start, end, launch))
        ranges = []
        for text, text_id, start, end in _select(
            base,
            "NVTX_EVENTS",
            "text, textId, start, end",
            f"eventType = {PUSHED} and end not null",
        ):
            ranges.append(Span(text or words.get(text_id, ""), start, end))
    return _complete("nsys", kernels, ranges)


def _select(
    base: sqlite3.Connection, table: str, columns: str, condition: str = "true"
) -> list[tuple]:
    """Return rows of a table; none where there is no such table."""
    if not base.execute("select 1 from sqlite_master where name = ?", (table,)).fetchone():
        return []
    return base.execute(f"select {columns} from {table} where {condition}").fetchall()


def _complete(source: str, kernels: list[Kernel], ranges: list[Span]) -> Trace:
    """Return the trace with its kernels in order, each with the path of its launch. Raises
    ValueError where there is none."""
    if not kernels:
        raise ValueError("no kernel and no operator was traced")
    kernels.sort(key=lambda kernel: (kernel.start_ns, kernel.stream))
    _file_under_ranges(kernels, ranges)
    return Trace(source, kernels, ranges)


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
        kernel.path = tuple([span.name for span in is_open])


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
    busy = 0
    for start_ns, end_ns in union((kernel.start_ns, kernel.end_ns) for kernel in kernels):
        busy += end_ns - start_ns
    return busy


def span_ns(kernels: Sequence[Kernel]) -> int:
    """Return the time from the first kernel's start to the last one's end."""
    first = min(kernel.start_ns for kernel in kernels)
    last = max(kernel.end_ns for kernel in kernels)
    return last - first


def kernel_rows(kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """Return rows of the bulk table `kernels`: phase, part, kind, kernel, calls, ms, median_us,
    share; the longest first.

    A kernel below `LEAST_SHARE` of all time is filed under "rest" of its phase, part and kind, so
    that the sums stay exact.
    """
    import pandas as pd

    group = ["phase", "part", "kind", "kernel"]
    cells = []
    for kernel in kernels:
        cells.append((kernel.phase, kernel.part, kernel.kind, kernel.name, kernel.duration_ns))
    frame = pd.DataFrame(cells, columns=[*group, "ns"])
    total_ns = frame["ns"].sum() or 1
    is_rest = frame.groupby("kernel")["ns"].transform("sum") / total_ns < LEAST_SHARE
    frame["kernel"] = frame["kernel"].map(shorten).mask(is_rest, "rest")
    rows = frame.groupby(group, sort=False)["ns"].agg(["size", "sum", "median"]).reset_index()
    rows = rows.rename(columns={"size": "calls"}).sort_values("sum", ascending=False, kind="stable")
    rows["ms"] = rows.pop("sum") / 1e6
    rows["median_us"] = rows.pop("median") / 1e3
    rows["share"] = rows["ms"] * 1e6 / total_ns
    return rows.to_dict("records")


@dataclass
class _Piece:
    """A stretch of one kind of `work` on a stream, as a strip has it: kind, phase and part."""

    start_ns: int
    end_ns: int
    stream: str
    work: tuple[str, str, str]


def strip_rows(
    kernels: Iterable[Kernel], start_ns: int, length_ns: int, most: int = ROWS
) -> list[dict[str, object]]:
    """Return rows of the bulk table `strip`: start_us and duration_us in the window, stream, kind,
    phase, part; launches are rows of the stream "host".

    The window begins at `start_ns` of the trace. Neighbours on a stream with equal kind, phase and
    part are one row where the gap is small; if there are still more than `most`, it ends earlier.
    """
    intervals: list[_Piece] = []
    for kernel in kernels:
        work = kernel.kind, kernel.phase, kernel.part
        intervals.append(_Piece(kernel.start_ns, kernel.end_ns, kernel.stream, work))
        launch = kernel.launch
        if launch is not None and launch.start_ns != kernel.start_ns:  # as an operator's is
            intervals.append(_Piece(launch.start_ns, launch.end_ns, HOST, work))
    intervals.sort(key=lambda piece: (piece.start_ns, piece.end_ns, piece.stream))
    pieces: list[_Piece] = []
    last: dict[str, _Piece] = {}  # of each stream, the only piece that may grow
    for piece in intervals:
        piece.start_ns = max(piece.start_ns, start_ns)
        piece.end_ns = min(piece.end_ns, start_ns + length_ns)
        if piece.start_ns >= piece.end_ns:
            continue
        before = last.get(piece.stream)
        is_alike = before is not None and before.work == piece.work
        if is_alike and piece.start_ns - before.end_ns <= NEIGHBOURS_NS:
            before.end_ns = max(before.end_ns, piece.end_ns)
        else:
            last[piece.stream] = piece
            pieces.append(piece)
    rows = []
    for piece in pieces[:most]:
        row = {"start_us": (piece.start_ns - start_ns) / 1e3}
        row["duration_us"] = (piece.end_ns - piece.start_ns) / 1e3
        row["stream"] = piece.stream
        row["kind"], row["phase"], row["part"] = piece.work
        rows.append(row)
    return rows
