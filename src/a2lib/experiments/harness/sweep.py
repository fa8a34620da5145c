"""What of a section is still to be measured, and measuring it in a worker that may die."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from a2lib.experiments.harness.process import Worker, WorkerDied
from a2lib.experiments.harness.ranks import Ranks
from a2lib.lab import Section, Store, StoreError
from a2lib.lab.failures import note as one_line
from a2lib.lab.store import format_value

# How the note begins of an `error` row that says nothing about its configuration: a process was
# ended twice from outside. The next sweep measures it again.
ENDED_FROM_OUTSIDE = "ended from outside"
NO_RESULT = "no result and no reason: a defect of a2lib"
# The longest step without an event is one compilation or one timing.
SILENCE_S = {"cuda": 300, "cpu": 1800}

Key = Mapping[str, object]


@dataclass(frozen=True)
class Task:
    """What a worker is asked for at once: ``spec``, which its handler understands and JSON holds.

    ``rows`` are the keys wanted, by culprit: whom an `error` row names when the process dies while
    it is at work. What is measured only as a whole has one culprit. Several may be measured
    ``in_turns``; if the process dies then, each is measured alone. ``ranks`` are those that measure
    it together; None is one process. They stay for the tasks after it that want the same.
    """

    label: str
    spec: Mapping[str, object]
    rows: Mapping[str, tuple[Key, ...]]
    in_turns: bool = False
    ranks: Ranks | None = None
    ended: bool = False  # a process that was at it was ended from outside

    @classmethod
    def whole(cls, label: str, spec: Mapping[str, object], keys: Iterable[Key]) -> Self:
        """What is measured only as a whole."""
        return cls(label, spec, {label: tuple(keys)})

    @property
    def keys(self) -> list[Key]:
        """Those of all culprits."""
        return [key for keys in self.rows.values() for key in keys]

    @property
    def size(self) -> int:
        return len(self.keys)

    def keep(self, is_left: Callable[[Key], bool]) -> Self:
        """This task with those of its rows alone of which ``is_left``."""
        kept = {culprit: tuple(filter(is_left, keys)) for culprit, keys in self.rows.items()}
        left = {culprit: keys for culprit, keys in kept.items() if keys}
        return dataclasses.replace(self, rows=left)


def gpus_of(tasks: Iterable[Task]) -> int:
    """How many GPUs one of ``tasks`` takes at most; a process that measures alone takes one."""
    groups = (task.ranks for task in tasks if task.ranks and task.ranks.device == "cuda")
    return max((group.world_size for group in groups), default=1)


def plan(
    tasks: Iterable[Task], store: Store, *, resume: bool = True, remeasure: bool = False
) -> list[Task]:
    """What of ``tasks`` is to be measured, in order.

    With ``resume`` it leaves out what ``store`` has, errors included but for those of processes
    that were ended from outside. With ``remeasure`` everything is measured, the longest ago first,
    so that a sequence of interrupted runs gets to the end as well.
    """
    tasks = list(tasks)
    if not resume:
        return tasks
    section = store.section
    runs = {
        identity(section, row): row["run"]
        for row in store.rows()
        if row["status"] != "error" or not row["note"].startswith(ENDED_FROM_OUTSIDE)
    }
    if not remeasure:
        left = [task.keep(lambda key: identity(section, key) not in runs) for task in tasks]
        return [task for task in left if task.size]

    def oldest(task: Task) -> str:
        # A run's id begins with the time it was started at.
        return min((runs.get(identity(section, key), "") for key in task.keys), default="")

    return sorted(tasks, key=oldest)


def identity(section: Section, row: Key) -> tuple[str, ...]:
    """The key of a row, as text, whether it comes from the store or from a task."""
    return tuple(format_value(column, row[column]) for column in section.key)


@dataclass
class Sweep:
    """Measures ``tasks`` one after another, storing rows under ``run``.

    ``until`` (``time.time()``) is when nothing more is started. ``row(row)`` is called after each
    wanted row was stored, ``begin(task, culprit)`` before each step. ``worker`` is one to begin
    with, and with ``keep`` the last is left there for another sweep. What says nothing for
    ``silence_s`` seconds is ended and blamed.
    """

    store: Store
    run: str
    device: str
    seed: int = 0
    until: float | None = None
    row: Callable[[Key], None] = lambda row: None
    begin: Callable[[Task, str | None], None] = lambda task, culprit: None
    silence_s: float | None = None
    worker: Worker | None = None
    keep: bool = False

    def measure(self, tasks: Sequence[Task]) -> int:
        """Measure, and return how many rows ``until`` has left.

        Whatever goes wrong in a configuration becomes its row. Raises StoreError where rows cannot
        be stored, and WorkerDied where a worker does not even start.
        """
        waiting = deque(task for task in tasks if task.size)
        try:
            while waiting and not self._late():
                task = waiting.popleft()
                left = self._measure_one(self._worker_for(task), task)
                if left.size and self._late():
                    waiting.append(left)
                elif left.size:
                    waiting.appendleft(left)
        finally:
            if self.worker is not None and not self.keep:
                self.worker.close()
        return sum(task.size for task in waiting)

    def _worker_for(self, task: Task) -> Worker:
        if self.worker is not None and self.worker.ranks != task.ranks:
            self.worker.close()
        if self.worker is None or self.worker.closed:
            self.worker = Worker(self.store.section.handler, task.ranks)
        return self.worker

    def _measure_one(self, worker: Worker, task: Task) -> Task:
        """What is left of ``task`` after ``worker`` had it."""
        left, raised = task, None
        culprit = next(iter(task.rows)) if len(task.rows) == 1 else None
        self.begin(task, culprit)
        request = self._request(task)
        silence_s = self.silence_s or SILENCE_S[request["device"]]
        try:
            for event in worker.ask(request, silence_s):
                if "row" in event:
                    left = self._less(left, event["row"])
                elif "begin" in event:
                    culprit = event["begin"]
                    self.begin(task, culprit)
                elif "raised" in event:
                    raised = event["status"], event["raised"]
                elif "fatal" in event:
                    raise StoreError(event["fatal"])
        except WorkerDied as died:
            if not worker.ready:
                raise
            if died.from_outside and not left.ended:
                return dataclasses.replace(left, ended=True)
            note = f"{ENDED_FROM_OUTSIDE}, twice: {died}" if died.from_outside else str(died)
            raised = raised or (died.status, note)
        if raised:
            return self._after_failure(left, culprit, left.size < task.size, *raised)
        if left.size and not self._late():
            self._blame(left, tuple(left.rows), "error", NO_RESULT)
            left = dataclasses.replace(left, rows={})
        return left

    def _request(self, task: Task) -> dict:
        return {
            "do": self.store.section.handler,
            "section": dataclasses.asdict(self.store.section),
            "spec": task.spec,
            "wanted": task.rows,
            "in_turns": task.in_turns,
            "device": task.ranks.device if task.ranks else self.device,
            "slug": self.store.device,
            "data": str(self.store.data),
            "run": self.run,
            "seed": self.seed,
            "until": self.until,
        }

    def _less(self, left: Task, row: Key) -> Task:
        """``left`` without ``row``, which need not be one that was wanted."""
        section = self.store.section
        stored = identity(section, row)
        rest = left.keep(lambda key: identity(section, key) != stored)
        if rest.size < left.size:
            self.row(row)
        return rest

    def _after_failure(
        self, left: Task, culprit: str | None, progressed: bool, status: str, note: str
    ) -> Task:
        """What is left of a task that failed while ``culprit`` ran, less the blamed."""
        if culprit not in left.rows and (progressed or left.in_turns):
            # The culprit's rows are stored, or several took turns: then each is measured alone.
            return dataclasses.replace(left, in_turns=left.in_turns and culprit is not None)
        blamed = (culprit,) if culprit in left.rows else tuple(left.rows)
        self._blame(left, blamed, status, note)
        rest = {name: keys for name, keys in left.rows.items() if name not in blamed}
        return dataclasses.replace(left, rows=rest, ended=False)

    def _blame(self, left: Task, culprits: Sequence[str], status: str, note: str) -> None:
        reason = {"status": status, "note": one_line(note), "run": self.run}
        for culprit in culprits:
            rows = [{**key, **reason} for key in left.rows[culprit]]
            self.store.put(*rows)
            for row in rows:
                self.row(row)

    def _late(self) -> bool:
        return self.until is not None and time.time() > self.until
