"""Whether each all-gather is done when its unit's turn comes: by events on both streams.

A unit's turn is when the stream that computes has done all before it; it computes once its
parameters are there. The two marks stand right before and right behind the wait, so what lies
between them is the wait, and a gather that ended before the turn was in time.
"""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from a2lib.experiments.data_parallel.sharded import Sharded
from a2lib.experiments.data_parallel.training import replayed
from a2lib.experiments.harness.ranks import RankJob
from a2lib.lab import synchronize
from a2lib.lab.clock import Mark
from a2lib.lab.timing import meet

# Steps that are looked at; the one of median length is the picture.
STEPS = 5
ROOT = "root"


@dataclass(frozen=True)
class Moment:
    """``name`` is one of ``a2lib.parallel.fsdp.units.MOMENTS``; "ends" ends the forward or the
    backward."""

    name: str
    unit: str
    phase: str
    ms: float


class Recorder:
    """Marks each moment of the steps that it is called in; ``moments`` reads the last of them."""

    def __init__(self, device: str, in_graph: bool = False) -> None:
        self._device, self._in_graph = device, in_graph
        self._phase = "forward"
        self._marks: list[tuple[str, str, str, Mark]] = []

    def phase(self, name: str) -> None:
        """A phase begins, on the stream that computes, and the one before it ends; "forward" begins
        a step."""
        if name == "forward":
            self._marks = []
        self("ends" if self._marks else "begins", "")
        self._phase = name

    def __call__(self, moment: str, unit: str) -> None:
        mark = Mark(self._device, self._in_graph)
        self._marks.append((moment, unit or ROOT, self._phase, mark))

    def moments(self) -> list[Moment]:
        """In the order of the host's calls; the device must be at rest."""
        first = self._marks[0][-1]
        return [Moment(*told, first.ms_until(mark)) for *told, mark in self._marks]


def table(moments: Sequence[Moment]) -> list[dict[str, object]]:
    """Rows of the bulk table ``gathers``: each all-gather and the pass of the unit it was for."""
    gathers: dict[tuple[str, str], float] = {}
    turns = [m for m in moments if m.name in ("turn", "ends")]
    rows = []
    for moment in moments:
        if moment.name in ("gather begins", "gather ends"):
            gathers[moment.name, moment.unit] = moment.ms
        elif moment.name == "turn":
            turn = moment
        elif moment.name == "computes" and ("gather ends", moment.unit) in gathers:
            # What is kept from the forward has none in backward.
            start, end = (
                gathers.pop((f"gather {what}", moment.unit)) for what in ("begins", "ends")
            )
            until = next(m for m in turns[turns.index(turn) + 1 :] if m.phase == turn.phase)
            rows.append({
                "unit": moment.unit, "pass": moment.phase, "gather_start_ms": start,
                "gather_end_ms": end, "turn_ms": turn.ms, "compute_start_ms": moment.ms,
                "compute_end_ms": until.ms, "slack_ms": turn.ms - end,
                "waited_ms": moment.ms - turn.ms,
            })  # fmt: skip
    return rows


def look(job: RankJob, training: Sharded) -> tuple[list[dict[str, object]], float]:
    """(The table of the step of median length on rank 0, the most that a rank waited in such a
    step); collective. Captured, of replays of a graph that has the marks in it."""
    recorder = Recorder(job.device, in_graph=bool(job.spec["capture"]))
    at = {name: partial(recorder.phase, name) for name in ("forward", "backward", "optimizer")}

    def marked() -> object:
        with training.calling(at):
            return training.step(send=True)

    found: list[list[Moment]] = []
    training.wrapper.observe(recorder)
    with contextlib.ExitStack() as held:
        held.callback(training.wrapper.observe, None)
        step = replayed(job, held, marked)
        for _ in range(STEPS):
            meet(job.device)
            step()
            synchronize(job.device)
            found.append(recorder.moments())
    waited = [sum(row["waited_ms"] for row in table(one)) for one in found]
    by_rank = job.everyone(statistics.median(waited))
    found.sort(key=lambda moments: moments[-1].ms)
    return table(found[len(found) // 2]), max(by_rank)
