"""The table of kernels, and which range each launch lies in."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from a2lib.errors import OneLine
from a2lib.lab.trace.classes import kind_of

PHASES = ("forward", "loss", "backward", "optimizer")
WAIT = "Synchronize"  # in the names of CUDA's calls that wait for the device
NO_LAUNCH = "no launch"  # the phase of a kernel whose launch is not in the trace
# The range around a step, as a2lib.benchmark names it and as a schedule of torch.profiler does.
STEP_OF = re.compile(r"step \d+|ProfilerStep#\d+")
# Ranges that libraries push for themselves, below those of the program.
OF_LIBRARIES = re.compile(r"(cub|thrust)::|Optimizer\.(step|zero_grad)#")


class TraceError(OneLine, ValueError):
    """The file is no trace that can be read; the message is one line and says why."""


@dataclass(frozen=True)
class Span:
    """A range, or a call of the host, by the thread that pushed or made it; nanoseconds."""

    name: str
    thread: tuple
    start_ns: int
    end_ns: int


@dataclass
class Kernel:
    """One kernel, copy or memset; nanoseconds from the trace's first event.

    ``path`` are the ranges around its launch from the outermost on: those of the main thread at
    that moment, then those of the launching thread where it is another. Empty where the launch lies
    in none, or is not there (``launch``, the call that put it into a stream, is None).
    """

    name: str
    device: int
    stream: str
    start_ns: int
    duration_ns: int
    launch: Span | None = None
    path: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> str:
        """Its class, one of ``KINDS``."""
        return kind_of(self.name)

    @property
    def range(self) -> str:
        """The innermost range that is no library's own, or the innermost of these; "" for none."""
        mine = [name for name in self.path if not OF_LIBRARIES.match(name)]
        return (mine or self.path or ("",))[-1]

    @property
    def part(self) -> str:
        """The range's name without the block's number: "layers.3.attn.q_proj.bwd" -> "attn.q_proj";
        a block itself is "block"."""
        name = self.range.removesuffix(".bwd")
        inside = re.fullmatch(r"layers\.\d+(?:\.(.+))?", name)
        return name if inside is None else inside[1] or "block"

    @property
    def phase(self) -> str:
        """The innermost of ``PHASES`` in its path, else the program's outermost range within the
        step, else the outermost there is."""
        if self.launch is None:
            return NO_LAUNCH
        found = [name for name in self.path if name in PHASES]
        if found:
            return found[-1]
        mine = [n for n in self.path if not (STEP_OF.fullmatch(n) or OF_LIBRARIES.match(n))]
        return (mine or self.path or ("",))[0]

    @property
    def step(self) -> str:
        """The range around the step, "step 0" by ``a2lib.benchmark`` or "ProfilerStep#0" by
        torch.profiler's schedule; "" for none."""
        return next((name for name in self.path if STEP_OF.fullmatch(name)), "")

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Trace:
    """``kernels`` in order of start; ``spans`` are the ranges, ``waits`` the host's calls that wait
    for a device. ``source`` is "nsys", "chrome" or "chrome, cpu" (operators instead of kernels);
    ``notes`` what the profiler had to say."""

    source: str
    kernels: list[Kernel]
    spans: list[Span]
    notes: list[str] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    def steps(self) -> dict[str, list[Kernel]]:
        """Step -> its kernels, in order."""
        found: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            if kernel.step:
                found[kernel.step].append(kernel)
        return dict(found)


def attribute(kernels: Iterable[Kernel], spans: list[Span]) -> None:
    """Give every kernel the ``path`` of its launch.

    The main thread of a process is the one whose ranges cover the most time. Sweeps with a stack of
    what is open: linear in ranges and launches but for the sorting.
    """
    ranges: dict[tuple, list[Span]] = defaultdict(list)
    for span in spans:
        ranges[span.thread].append(span)
    launched: dict[tuple, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.launch is not None:
            launched[kernel.launch.thread].append(kernel)
    covered = {t: covered_ns((s.start_ns, s.end_ns) for s in mine) for t, mine in ranges.items()}
    mains = {thread[0]: thread for thread in sorted(covered, key=covered.get)}  # of each process
    for thread, mine in launched.items():
        main = mains.get(thread[0])
        _extend(mine, ranges.get(main, []))
        if thread != main:
            _extend(mine, ranges.get(thread, []))


def _extend(kernels: list[Kernel], spans: list[Span]) -> None:
    """Add to each path the names of the spans that hold its launch's start, outermost first."""
    spans = sorted(spans, key=lambda s: (s.start_ns, -s.end_ns))
    stack: list[Span] = []
    following = 0
    for kernel in sorted(kernels, key=lambda k: k.launch.start_ns):
        now = kernel.launch.start_ns
        while following < len(spans) and spans[following].start_ns <= now:
            stack.append(spans[following])
            following += 1
        stack = [s for s in stack if s.end_ns > now]
        kernel.path += tuple(s.name for s in stack)


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end)."""
    return sum(end - start for start, end in union(intervals))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches (start, end) that at least one interval covers, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def assembled(
    source: str,
    kernels: Iterable[Kernel],
    spans: Iterable[Span],
    waits: Iterable[Span],
    notes: Iterable[str] = (),
) -> Trace:
    """The trace of what was read: counted from the first kernel, launch or span of all, and every
    kernel with the path of its launch. Raises TraceError for one that ends before it starts."""
    kernels = sorted(kernels, key=lambda k: (k.start_ns, k.stream))
    for one in (*kernels, *spans):
        if one.end_ns < one.start_ns:
            raise TraceError(f"{one.name!r} ends before it starts"[:200])
    starts = [one.start_ns for one in (*kernels, *spans)]
    zero = min(starts + [k.launch.start_ns for k in kernels if k.launch], default=0)

    def moved(one: Span) -> Span:
        return Span(one.name, one.thread, one.start_ns - zero, one.end_ns - zero)

    for kernel in kernels:
        kernel.start_ns -= zero
        kernel.launch = kernel.launch and moved(kernel.launch)
    spans = list(map(moved, spans))
    attribute(kernels, spans)
    waits = sorted(map(moved, waits), key=lambda one: one.start_ns)
    return Trace(source, kernels, spans, list(notes), waits)
