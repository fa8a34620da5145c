"""What of a sweep is still to be measured, and measuring it in a worker that may die."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from a2lib.experiments.process import WORKER, Worker, WorkerDied
from a2lib.experiments.shapes import Parameters, Shape
from a2lib.measure import FLASH, Store, StoreError
from a2lib.theory.attention import PASSES

# How the note begins of an `error` row that says nothing about its configuration: a process was
# ended twice from outside. The next sweep measures it again.
ENDED_FROM_OUTSIDE = "ended from outside"
# The longest step without an event is one compilation or the timing of one pass.
SILENCE_S = {"cuda": 300, "cpu": 1800}


@dataclass(frozen=True)
class Task:
    """The passes wanted of each implementation at one shape."""

    shape: Shape
    wanted: Mapping[str, tuple[str, ...]]
    in_turns: bool = True
    ended: bool = False  # a process that was at it was ended from outside

    @property
    def size(self) -> int:
        return sum(len(passes) for passes in self.wanted.values())

    def without(self, done: set[tuple[str, str]]) -> Task:
        """This task less the (implementation, pass) pairs in ``done``."""
        left = {
            name: kept
            for name, passes in self.wanted.items()
            if (kept := tuple(p for p in passes if (name, p) not in done))
        }
        return dataclasses.replace(self, wanted=left)


def plan(parameters: Parameters, device: str, store: Store) -> list[Task]:
    """The tasks of ``parameters`` on ``device`` ("cuda" or "cpu"), in order.

    A single shape is always measured. A sweep leaves out what ``store`` has, errors included but
    for those of processes that were ended from outside, unless ``remeasure``: then everything is
    measured, the longest ago first, so that a sequence of interrupted runs gets to the end as well.
    """
    runs = {}
    if parameters.sweep != "shape":
        runs = {_key(row): row["run"] for row in store.rows() if not _says_nothing(row)}
    tasks = []
    age: dict[Shape, str] = {}
    for shape in parameters.shapes(device):
        wanted = {}
        stored = []
        for name in parameters.chosen_implementations(shape, device):
            known = {p: runs.get(_key(shape.key(name, p))) for p in parameters.chosen_passes()}
            stored += [run or "" for run in known.values()]
            passes = tuple(p for p, run in known.items() if run is None or parameters.remeasure)
            if passes:
                wanted[name] = passes
        if wanted:
            tasks.append(Task(shape, wanted))
            age[shape] = min(stored)
    # A run's id begins with the time it was started at.
    return sorted(tasks, key=lambda task: age[task.shape]) if parameters.remeasure else tasks


@dataclass
class Sweep:
    """Measures ``tasks`` one after another, storing rows under ``run``.

    ``until`` (``time.time()``) is when nothing more is started. ``row(row)`` is called after each
    row was stored, ``begin(shape, implementation)`` before each step.
    """

    store: Store
    run: str
    device: str
    seed: int = 0
    until: float | None = None
    row: Callable[[dict], None] = lambda row: None
    begin: Callable[[Shape, str | None], None] = lambda shape, implementation: None
    command: Sequence[str] = WORKER
    silence_s: float | None = None

    def measure(self, tasks: Sequence[Task], worker: Worker | None = None) -> int:
        """Measure, beginning with ``worker`` if given; return how many rows ``until`` has left.

        Whatever goes wrong in a configuration becomes its row. Raises StoreError where rows cannot
        be stored, and WorkerDied where a worker does not even start.
        """
        waiting = deque(tasks)
        try:
            while waiting and not self._late():
                task = waiting.popleft()
                if worker is None or worker.closed:
                    worker = Worker(self.command)
                left = self._measure_one(worker, task)
                if left.size and self._late():
                    waiting.append(left)
                elif left.size:
                    waiting.appendleft(left)
        finally:
            if worker is not None:
                worker.close()
        return sum(task.size for task in waiting)

    def _measure_one(self, worker: Worker, task: Task) -> Task:
        """What is left of ``task`` after ``worker`` had it."""
        done: set[tuple[str, str]] = set()
        culprit = None
        request = {
            "do": "compare",
            "shape": dataclasses.asdict(task.shape),
            "wanted": task.wanted,
            "in_turns": task.in_turns,
            "device": self.device,
            "slug": self.store.device,
            "data": str(self.store.data),
            "run": self.run,
            "seed": self.seed,
            "until": self.until,
        }
        try:
            for event in worker.ask(request, self.silence_s or SILENCE_S[self.device]):
                if "row" in event:
                    done.add((event["row"]["implementation"], event["row"]["pass"]))
                    self.row(event["row"])
                elif "begin" in event:
                    culprit = event["begin"]
                    self.begin(task.shape, culprit)
                elif "fatal" in event:
                    raise StoreError(event["fatal"])
        except WorkerDied as died:
            if not worker.ready:
                raise
            return self._after_death(task.without(done), culprit, bool(done), died)
        left = task.without(done)
        if left.size and not self._late():
            self._blame(
                left, tuple(left.wanted), "error", "no result and no reason: a defect of a2lib"
            )
            left = left.without({(n, p) for n, passes in left.wanted.items() for p in passes})
        return left

    def _after_death(
        self, left: Task, culprit: str | None, progressed: bool, died: WorkerDied
    ) -> Task:
        """What is left of a task whose worker died while it ran ``culprit``, less the blamed."""
        if died.from_outside and not left.ended:
            return dataclasses.replace(left, ended=True)
        if culprit not in left.wanted and (progressed or left.in_turns):
            # The culprit's rows are stored, or several took turns: then each is measured alone.
            return dataclasses.replace(left, in_turns=left.in_turns and culprit is not None)
        blamed = (culprit,) if culprit in left.wanted else tuple(left.wanted)
        note = f"{ENDED_FROM_OUTSIDE}, twice: {died}" if died.from_outside else str(died)
        self._blame(left, blamed, "oom" if died.no_memory else "error", note)
        left = left.without({(name, p) for name in blamed for p in PASSES})
        return dataclasses.replace(left, ended=False)

    def _blame(self, left: Task, names: Sequence[str], status: str, note: str) -> None:
        from a2lib.experiments.peers import note as one_line

        for name in names:
            for pass_ in left.wanted[name]:
                row = left.shape.key(name, pass_) | {"status": status, "note": one_line(note)}
                self.store.put(row | {"run": self.run})
                self.row(row)

    def _late(self) -> bool:
        return self.until is not None and time.time() > self.until


def _says_nothing(row: Mapping[str, str]) -> bool:
    return row["status"] == "error" and row["note"].startswith(ENDED_FROM_OUTSIDE)


def _key(row: Mapping[str, object]) -> tuple[str, ...]:
    """The key of a row, as text, whether it comes from the store or from Shape.key."""
    values = (row[column] for column in FLASH.key)
    return tuple(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
