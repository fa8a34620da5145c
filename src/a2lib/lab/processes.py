"""The processes that work for a sweep: started, waited for, and asked why they died.

    end = Group(folder, mark, ranks, bar, table, run, silence_s).work(tasks)
    end.reached, end.note       # tasks that are done; of the one behind them what went wrong

In the folder lie `job` and `tasks.json` for the workers (`worker.py`). They leave there `reached`,
the number of tasks done, `rows.jsonl`, the key and status of each row stored, of each rank `pid.0`,
`stack.0` and `error.0.json`, and `log`, all that they print.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from a2lib.errors import OneLine
from a2lib.lab import guard
from a2lib.lab.failures import note as one_line
from a2lib.lab.progress import Progress
from a2lib.lab.ranks import cores
from a2lib.lab.store import StoreError, Table
from a2lib.paths import cache_dir

Key = Mapping[str, object]

# Processes may take this long until the first of their tasks begins: they load torch, and meet.
START_S = 300
# A worker's process may take this long to get from a signal to its end.
END_S = 15
POLL_S = 0.05
# What a process does not do to itself.
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a rank says when another one is gone.
PEER_GONE = re.compile(r"Connection (closed|reset) by (remote )?peer", re.IGNORECASE)
AT_WORK = "a2lib-at-work"
COMPILED = (".so", ".o", ".gch")


class WorkerError(OneLine, RuntimeError):
    """The processes of a sweep could not be started; the message says why."""


class End:
    """The end of a sweep's processes: how many tasks they did and what they stored, and of the task
    at which they died the status and the note."""

    def __init__(self, reached: int, stored: set[tuple[str, ...]], table: Table) -> None:
        self.reached, self._stored, self._table = reached, stored, table
        self.status, self.note, self.from_outside = "", "", False

    @property
    def is_orderly(self) -> bool:
        return not self.status

    def missing(self, task: list[Key]) -> list[Key]:
        """Return the keys of a task that have no row."""
        return [key for key in task if self._table.identify(key) not in self._stored]

    def blame(self, status: str, note: str, from_outside: bool = False) -> End:
        self.status, self.note, self.from_outside = status, one_line(note), from_outside
        return self


@dataclass
class Group:
    """The processes that work for a sweep, one or several ranks; a new one after each that died."""

    folder: Path
    mark: str
    ranks: int
    bar: Progress
    table: Table
    run_id: str
    silence_s: float

    def fail(self, keys: list[Key], status: str, note: str) -> None:
        """Store a row that says why for each of these keys."""
        rows = [{**key, "status": status, "note": note, "run": self.run_id} for key in keys]
        self.table.put(*rows)
        self.bar.advance(len(rows), status)

    def work(self, tasks: list[list[Key]]) -> End:
        """Start processes, wait until they have done `tasks` or ended, and say how."""
        for path in self.folder.iterdir():
            if path.name != "job":
                path.unlink()
        self.tasks = tasks
        self.asked = {self.table.identify(key) for task in tasks for key in task}
        (self.folder / "tasks.json").write_text(json.dumps(tasks))
        _drop_half_compiled()
        with open(self.folder / "log", "w") as log:
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,  # a Ctrl-C is for the sweep, which ends it
            )
            try:
                silent = self._wait(process)
            finally:
                self._end(process)
        if process.returncode in (0, 1):  # no signal ended it in mid-compilation
            _compiler_mark().unlink(missing_ok=True)
        end = End(self._reached(), set(self._rows()), self.table)
        if silent:
            return end.blame("error", silent)
        return end if process.returncode == 0 else self._explain(end, process.returncode)

    def _command(self) -> list[str]:
        launcher = []
        if self.ranks > 1:
            count = f"--nproc-per-node={self.ranks}"
            launcher = ["torch.distributed.run", "--standalone", count, "-m"]
        return [sys.executable, "-m", *launcher, "a2lib.lab.worker", str(self.folder)]

    def _environment(self) -> dict[str, str]:
        """Return a worker's environment: code is compiled once for this and later runs, and by the
        worker itself, since idle compilers would take the cores beside what is timed."""
        cache = cache_dir()
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": str(max(1, cores() // self.ranks)),
            **os.environ,
            "TRITON_INTERPRET": "0",
            guard.VARIABLE: self.mark,
        }
        # One connection would run collectives after the kernels they should hide behind.
        if self.ranks > 1 and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
        return environment

    def _wait(self, process: subprocess.Popen) -> str:
        """Wait for the end of the processes; where they are silent for too long, say so."""
        counted, began, heard = Counter(), False, time.monotonic()
        said = None
        while process.poll() is None:
            task = self.tasks[min(self._reached(), len(self.tasks) - 1)]
            if task is not said:
                self.bar.say(_describe(task))
                said = task
            self.bar.show()
            time.sleep(POLL_S)
            new = self._asked_rows() - counted
            if new:
                self._count(new)
                counted, heard = counted + new, time.monotonic()
            if not began and (self.folder / "reached").exists():
                began, heard = True, time.monotonic()
            if time.monotonic() > heard + (self.silence_s if began else START_S):
                return f"no row within {self.silence_s:g} s: {self._where()}"
        self._count(self._asked_rows() - counted)
        return ""

    def _count(self, rows: Counter[str]) -> None:
        for status, number in rows.items():
            self.bar.advance(number, status)

    def _end(self, process: subprocess.Popen) -> None:
        """End the processes and everything that they started."""
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        guard.kill_marked(self.mark)
        process.wait()

    def _where(self) -> str:
        """Return where each rank stands, in a few words: its innermost call."""
        places: dict[str, list[str]] = {}
        for path in sorted(self.folder.glob("pid.*")):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGUSR1)
        time.sleep(0.5)
        for path in sorted(self.folder.glob("stack.*")):
            frame = re.search(r'File "(?:.*/)?(.+)", line (\d+) in (.+)', path.read_text())
            place = f"{frame[3]} ({frame[1]}:{frame[2]})" if frame else "a place not known"
            places.setdefault(place, []).append(path.suffix[1:])
        if self.ranks == 1:
            return f"in {next(iter(places), 'a place not known')}"
        return "; ".join(f"rank {', '.join(at)} in {place}" for place, at in places.items())

    def _explain(self, end: End, code: int) -> End:
        """Say why the processes died: by a signal, by what they raised, or by neither."""
        errors = [json.loads(path.read_text()) for path in self.folder.glob("error.*.json")]
        errors.sort(key=lambda error: error["at"])
        log = (self.folder / "log").read_text(errors="replace")
        for error in errors:
            if "fatal" in error:
                raise StoreError(error["fatal"])
        signals = _signals(code, log, self.ranks)
        was_killed = any(ended.is_from_outside for ended in signals)
        if not was_killed and not list(self.folder.glob("pid.*")):
            raise WorkerError(f"no process could start: {_last_line(log)}")
        # Of a rank that a signal ended the others say that it is gone: they are not to blame.
        is_of_itself = any(not PEER_GONE.search(error["note"]) for error in errors)
        for ended in signals:
            if not (ended.is_from_outside and is_of_itself):
                note = f"{ended.who} was killed by {signal.Signals(ended.number).name}"
                return end.blame("error", note, ended.is_from_outside)
        if errors:
            return end.blame(errors[0]["status"], errors[0]["note"])
        return end.blame("error", f"its process ended with code {code}: {_last_line(log)}")

    def _reached(self) -> int:
        path = self.folder / "reached"
        return int(path.read_text()) if path.exists() else 0

    def _asked_rows(self) -> Counter[str]:
        """Return how many of the rows asked for are stored, by status; others may come with
        them."""
        statuses = Counter()
        for key, status in self._rows().items():
            if key in self.asked:
                statuses[status] += 1
        return statuses

    def _rows(self) -> dict[tuple[str, ...], str]:
        """Return the status of each row that these processes have stored."""
        path = self.folder / "rows.jsonl"
        if not path.exists():
            return {}
        whole, _, _ = path.read_text().rpartition("\n")
        rows = {}
        for line in whole.splitlines():
            *key, status = json.loads(line)
            rows[tuple(key)] = status
        return rows


class _Signal(NamedTuple):
    """A signal that ended a process, and whose."""

    who: str
    number: int

    @property
    def is_from_outside(self) -> bool:
        return self.number in OUTSIDE_SIGNALS


def _signals(code: int, log: str, ranks: int) -> list[_Signal]:
    """Return the signals that ended processes, those that a process sends itself first."""
    if ranks == 1:
        return [_Signal("its process", -code)] if code < 0 else []
    # torchrun tells it of each rank in its report.
    ended = []
    for rank, end in re.findall(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)", log):
        if int(end) < 0:
            ended.append(_Signal(f"rank {rank} of {ranks}", -int(end)))
    if ended:
        return sorted(ended, key=lambda signal: signal.is_from_outside)
    if code < 0:
        return [_Signal("torchrun", -code)]
    raised = re.search(r"SignalException: Process \d+ got signal: (\d+)", log)
    return [_Signal("torchrun", int(raised[1]))] if raised else []


def _last_line(log: str) -> str:
    lines = log.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _drop_half_compiled() -> None:
    """Drop what is compiled where a worker was killed at work, and mark that one is at work now.

    Inductor's compiler writes under the final name, and what has that name counts as whole.
    """
    mark = _compiler_mark()
    if mark.exists():
        for path in mark.parent.rglob("*"):
            if path.suffix in COMPILED:
                path.unlink(missing_ok=True)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _compiler_mark() -> Path:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir() / "inductor"
    return Path(folder) / AT_WORK


def _describe(task: list[Key]) -> str:
    """Return what all keys of a task have in common, in words."""
    words = []
    for column, value in task[0].items():
        is_shared = all(key.get(column) == value for key in task)
        if is_shared and value not in ("", None, False):
            words.append(str(value))
    return " ".join(words)[:60]
