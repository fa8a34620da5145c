"""Ask whether an FSDP's all-gathers are done when their unit's turn comes, by events.

    moments, waited_ms = steps_with_marks(training, capture=False)
    rows = gather_rows(moments)                          # of the bulk table "gathers"

A unit's turn is when the stream that computes has done all before it; it computes once its
parameters are there. The two marks stand right before and right behind the wait, so what lies
between them is the wait, and a gather that ended before the turn was in time.
"""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from a2lib.lab.clock import Mark
from a2lib.lab.device import synchronize
from a2lib.lab.timing import meet
from a2lib.lab.training import Training, replayed

# Steps that are looked at; the one of median length is the picture.
STEPS = 5
ROOT = "root"
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Moment:
    """`name` is one of `a2lib.parallel.fsdp.units.MOMENTS`; "begins" begins a step, and "ends" ends
    its forward or its backward."""

    name: str
    unit: str
    phase: str
    ms: float


class Recorder:
    """Marks each moment of the steps that it observes; `moments` reads the last of them."""

    def __init__(self, device: str, in_graph: bool = False) -> None:
        self._device, self._in_graph = device, in_graph
        self._phase = "forward"
        self._marks: list[tuple[str, str, str, Mark]] = []

    def phase(self, name: str) -> AbstractContextManager:
        """Mark, on the stream that computes, that a phase begins and the one before it ends;
        "forward" begins a step."""
        if name == "forward":
            self._marks = []
        if name in PHASES:
            self("ends" if self._marks else "begins", "")
            self._phase = name
        return nullcontext()

    def __call__(self, moment: str, unit: str) -> None:
        mark = Mark(self._device, self._in_graph)
        self._marks.append((moment, unit or ROOT, self._phase, mark))

    def moments(self) -> list[Moment]:
        """Return the moments in the order of the host's calls; the device must be at rest."""
        first = self._marks[0][-1]
        return [
            Moment(name, unit, phase, first.ms_until(mark))
            for name, unit, phase, mark in self._marks
        ]


def gather_rows(moments: Sequence[Moment]) -> list[dict[str, object]]:
    """Return rows of the bulk table "gathers": each all-gather and the pass of the unit it was for.

    What is kept from the forward has none in backward.
    """
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    for moment in moments:
        if moment.name == "gather begins":
            begun[moment.unit] = moment.ms
        elif moment.name == "gather ends":
            ended[moment.unit] = moment.ms
        elif moment.name in ("turn", "ends"):
            turn_ms = moment.ms
            if rows and rows[-1]["compute_end_ms"] is None:
                rows[-1]["compute_end_ms"] = moment.ms
        elif moment.name == "computes" and moment.unit in ended:
            end_ms = ended.pop(moment.unit)
            rows.append(
                {
                    "unit": moment.unit,
                    "pass": moment.phase,
                    "gather_start_ms": begun.pop(moment.unit),
                    "gather_end_ms": end_ms,
                    "turn_ms": turn_ms,
                    "compute_start_ms": moment.ms,
                    "compute_end_ms": None,
                    "slack_ms": turn_ms - end_ms,
                    "waited_ms": moment.ms - turn_ms,
                }
            )
    return rows


def steps_with_marks(training: Training, capture: bool) -> tuple[list[Moment], float]:
    """Return the moments of the step of median length on rank 0, and the most milliseconds that a
    rank waited in its median step; every rank calls it. Captured, they are of replays of a graph
    that has the marks in it."""
    from a2lib.parallel.group import everyone

    device = training.device
    recorder = Recorder(device, in_graph=capture)
    every: list[list[Moment]] = []
    training.wrapper.observe(recorder)
    with ExitStack() as held:
        held.callback(training.wrapper.observe, None)
        step = replayed(lambda: training(recorder.phase), capture, held)
        for _ in range(STEPS):
            meet(device)
            step()
            synchronize(device)
            every.append(recorder.moments())
    waited = []
    for moments in every:
        waited.append(sum(row["waited_ms"] for row in gather_rows(moments)))
    most = max(everyone(statistics.median(waited)))
    every.sort(key=lambda moments: moments[-1].ms)
    return every[len(every) // 2], most
