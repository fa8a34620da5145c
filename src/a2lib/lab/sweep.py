"""Measure what is not stored yet, in processes that may die.

    sweep(table, tasks, measure, run)                # in a process of its own
    sweep(table, tasks, measure, run, ranks=2)       # by torchrun: every rank calls `measure`

A task is a list of row keys that are measured together. `measure(keys)` yields rows: the keys with
what was measured. What fails together is tried alone; what fails alone is a row that says why: an
exception, a process that dies, one that is silent for too long.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from a2lib.errors import OneLine
from a2lib.lab import guard
from a2lib.lab.failures import note as one_line
from a2lib.lab.lock import device_lock
from a2lib.lab.notebook import Run
from a2lib.lab.processes import Group, WorkerError
from a2lib.lab.progress import Progress
from a2lib.lab.runs import read_runs, start_run
from a2lib.lab.sources import is_other, sources
from a2lib.lab.store import Table

Key = Mapping[str, object]

# The longest step without a row is one compilation or one timing.
SILENCE_S = {"cuda": 300, "cpu": 1800}
LARGEST_JOB = 2**20
# How the note begins of an error that says nothing about its configuration. It is measured again.
FROM_OUTSIDE = "ended from outside"
NO_ROW = "measure yielded no row for this key"
LEFT_EARLY = "its process ended, with exit code 0, before the task did"


class Interrupted(OneLine, KeyboardInterrupt):
    """A sweep was interrupted; the message says what is kept and how to go on."""


def sweep(
    table: Table,
    tasks: Iterable[Sequence[Key]],
    measure: Callable[[list[Key]], Iterator[Mapping[str, object]]],
    run: Run,
    *,
    ranks: int = 1,
    device: str = "",
    whole: bool = False,
    fresh: bool = False,
    silence_s: float | None = None,
) -> int:
    """Measure the rows of `tasks` that are not stored; return how many the time limit has left.

    Arguments:

    - `table` gets the rows.
    - `tasks` is a list of tasks. A task is a list of keys, which are measured together in one call.
    - `measure(keys)` is a generator that yields a dict for each row: the key and the values. It
      runs in another process, so that running out of memory or hanging ends that process alone.
    - `run` is what `start` has returned. If it is to `remeasure`, stored rows are measured again,
      the oldest first.
    - `ranks` is the number of processes that call `measure` together: an NCCL group with a GPU
      each, or on the CPU a gloo group.
    - `device` is "cuda" or "cpu", where `measure` works (default: the run's).
    - `whole` says that the keys of a task are one measurement. If it fails, all of them get the
      failure as their row. Otherwise each key is tried alone before its failure becomes a row.
    - `fresh` starts a new process for each task.
    - `silence_s` is the number of seconds after which a task that yields nothing is ended.

    Raises DeviceBusy where another process measures on the device, StoreError where a row cannot be
    stored, WorkerError where no process starts, Interrupted on a Ctrl-C. Rows that were yielded
    before are stored in every case.
    """
    device = device or run.device
    tasks = [list(map(dict, task)) for task in tasks]
    stored = _stored_runs(table)
    code = sources(measure)
    if not run.remeasure:
        _say_what_is_stored(table, tasks, stored, code)
    waiting = deque(_pending(table, tasks, stored, run.remeasure))
    total = sum(map(len, waiting))
    if not total:
        return 0
    with (
        device_lock(device, f"run of {run.notebook}"),
        _folder() as (folder, mark),
        contextlib.closing(Progress(total, table.section.name)) as bar,
    ):
        run_id = start_run(
            command=run.command,
            parameters=run.parameters,
            device=table.device,
            n_devices=ranks if device == "cuda" else 1,
            data=table.data,
            source=json.dumps(code, sort_keys=True),
        )
        job = {
            "measure": measure,
            "table": table,
            "run": run_id,
            "until": run.until,
            "device": device,
            "whole": whole,
        }
        (folder / "job").write_bytes(_pickled(job))
        silence_s = silence_s or SILENCE_S[device]
        group = Group(folder, mark, ranks, bar, table, run_id, silence_s)
        try:
            left = _measure(group, waiting, run.until, whole, fresh)
        except KeyboardInterrupt:
            raise Interrupted(
                "every row measured so far is stored; to go on, run this cell again or start the"
                " same command again"
            ) from None
    rows = "1 row" if total - left == 1 else f"{total - left} rows"
    print(f"{table.section.name}: {rows} measured\n  run     {run_id}")
    if left:
        print(f"Time limit reached: {left} rows are left. To go on, run the same command again:")
        print(f"  {run.command}")
    return left


def _stored_runs(table: Table) -> dict[tuple[str, ...], str]:
    """Return the run of each row that counts as measured."""
    runs = {}
    for row in table.rows():
        if not row.get("note", "").startswith(FROM_OUTSIDE):
            runs[table.identify(row)] = row["run"]
    return runs


def _say_what_is_stored(
    table: Table,
    tasks: list[list[dict]],
    stored: Mapping[tuple[str, ...], str],
    code: Mapping[str, str],
) -> None:
    """Say in one line how many of the rows asked for are stored, and how many by other code."""
    recorded = {run["run"]: run["source"] for run in read_runs(table.data)}
    number = by_others = 0
    for key in itertools.chain.from_iterable(tasks):
        run = stored.get(table.identify(key))
        if run is not None:
            number += 1
            by_others += is_other(recorded.get(run, ""), code, key)
    if not number:
        return
    said = f"{number} rows are stored already"
    if number == 1:
        said = "1 row is stored already"
    if 0 < by_others < number:
        said += f", {by_others} of them"
    if by_others:
        again = "it" if by_others == 1 else "them"
        said += f" by other code; remeasure=True measures {again} again"
    print(f"{table.section.name}: {said}")


def _pending(
    table: Table,
    tasks: list[list[dict]],
    stored: Mapping[tuple[str, ...], str],
    remeasure: bool,
) -> list[list[Key]]:
    """Return what of each task is to be measured."""
    if remeasure:
        # A run's id begins with its time; interrupted runs get to the end of a sweep as well.
        def oldest(task: list[Key]) -> str:
            return min(stored.get(table.identify(key), "") for key in task)

        return sorted(filter(None, tasks), key=oldest)
    pending = []
    for task in tasks:
        left = [key for key in task if table.identify(key) not in stored]
        if left:
            pending.append(left)
    return pending


def _measure(
    group: Group, waiting: deque[list[Key]], until: float, whole: bool, fresh: bool
) -> int:
    """Have processes do what is waiting, until the time limit; return how many rows are left."""
    ended_before: set[tuple[str, ...]] = set()  # by somebody, when these were next
    while waiting and time.time() < until:
        tasks = [waiting[0]] if fresh else list(waiting)
        end = group.work(tasks)
        for _ in range(end.reached):
            group.fail(end.missing(waiting.popleft()), "error", NO_ROW)
        if end.is_orderly and (end.reached == len(tasks) or time.time() >= until):
            continue
        if end.is_orderly:
            end.blame("error", LEFT_EARLY)
        left = end.missing(waiting.popleft()) if waiting else []
        if not left:  # a process may die behind its last row, which is no row's fault
            print(f"behind its last row: {end.note}")
            continue
        first = group.table.identify(left[0])
        if end.from_outside and first not in ended_before:
            ended_before.add(first)
            waiting.appendleft(left)
        elif len(left) > 1 and not whole:
            waiting.extendleft([key] for key in reversed(left))
        elif end.from_outside:
            group.fail(left, end.status, one_line(f"{FROM_OUTSIDE}, twice: {end.note}"))
        else:
            group.fail(left, end.status, end.note)
    return sum(map(len, waiting))


def _pickled(job: dict) -> bytes:
    """Return the job for the workers; functions of a notebook's cells go by value."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(job)
    except Exception as error:
        raise WorkerError(
            f"measure cannot be sent to a process of its own: {error}; it uses a global that cannot"
            " be pickled: make that within the function"
        ) from None
    if len(data) > LARGEST_JOB:
        raise WorkerError(
            f"measure takes {len(data) / 1e6:.0f} MB along: it uses a large global, a tensor say;"
            " make that within the function"
        )
    return data


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, str]]:
    """Make a temporary folder and a mark of processes; neither is left, however this ends."""
    folder = Path(tempfile.mkdtemp(prefix="a2lib-sweep-"))
    mark = secrets.token_hex(8)
    with guard.watch(mark, folder):
        yield folder, mark
