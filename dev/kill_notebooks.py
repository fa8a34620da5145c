"""Kill processes of notebooks at random moments, and look at the rows and processes that are left.

    nice python dev/kill_notebooks.py --runs 42               # all notebooks, in turn
    nice python dev/kill_notebooks.py --runs 42 --from 20     # go on with run 20

Each notebook runs whole once, which says how long it takes and which rows it ends with. Of later
runs a worker, torchrun or a rank is killed several times, until the notebook ends or papermill or
the Jupyter kernel is killed; such a notebook is run again. Whatever is killed, what worked with it
is gone within half a minute, each stored line stays, and at the end there are the rows of a whole
run, with no key twice and no unknown run. A line is printed for each kill and each run; the files
of one with a FAULT are kept in build/kills. It looks into /proc, which is Linux's.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from a2lib.lab import SECTIONS, read_section
from a2lib.lab.sweep import FROM_OUTSIDE
from a2lib.paths import ROOT

MARK = "A2LIB_KILLS"  # in the environment of each process of a run, which it names
GONE_S = 30
MOST_KILLS = 8  # of one run
# From quick to slow; what differs from a CPU's defaults.
NOTEBOOKS = "mixed_precision attention memory checkpointing collectives profile parallelism ddp"
NOTEBOOKS = f"{NOTEBOOKS} sharded_optimizer fsdp benchmark flash compile leaderboard".split()
PARAMETERS = {
    "attention": "-p implementations eager,by_hand,tiled",
    "collectives": "-p operations all_reduce,all_gather,broadcast",
    "parallelism": "-p tokens 8,32",
    "ddp": "-p wrappers naive,flat,bucketed",
    "leaderboard": "-p layers 2 -p cold False",
}
ENDS_ALL = ("papermill", "kernel")
WORKERS = ("torchrun", "worker", "rank")
# What a command has that a run starts: torchrun's has the worker's too.
COMMANDS = {
    "bin/papermill": "papermill",
    "ipykernel_launcher": "kernel",
    "torch.distributed.run": "torchrun",
    "a2lib.lab.worker": "worker",
}


class NotebookRun:
    """A notebook at work through papermill, with a folder of its own for all that it writes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.mark = folder, f"{MARK}={folder}".encode()
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        papermill = Path(sys.executable).with_name("papermill")
        command = [papermill, f"notebooks/{name}.ipynb", folder / "executed.ipynb"]
        command += PARAMETERS.get(name, "").split()
        environment = {**os.environ, MARK: str(folder), "A2LIB_DATA": str(folder / "data")}
        environment["A2LIB_LOCKS"] = environment["TMPDIR"] = str(folder / "tmp")
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": ROOT}
        with open(folder / "log", "a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, **streams)

    def living(self) -> dict[int, str]:
        """Return the processes that live: ids and roles, "" for a program that has none."""
        living = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                environment = (entry / "environ").read_bytes()
                if self.mark in environment.split(b"\0"):
                    command = (entry / "cmdline").read_bytes().decode()
                    living[int(entry.name)] = role_of(command, b"\0RANK=" in environment)
        return living

    def has_ended(self, seconds: float) -> bool:
        """Return whether papermill has ended when so many seconds are over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def left(self, pids: set[int] | None = None) -> list[str]:
        """Wait until the processes `pids`, by default all, are gone; return those that are not."""
        end = time.monotonic() + GONE_S
        while left := [pid for pid in self.living() if pids is None or pid in pids]:
            self.process.poll()
            if time.monotonic() > end:
                return [f"left: {pid} {self.living().get(pid)}" for pid in left]
            time.sleep(0.1)
        return []

    def lines(self) -> set[str]:
        """Return every line of every table, behind the table's name."""
        measured = self.folder / "data" / "measured"
        paths = [*measured.glob("*.csv"), *measured.glob("*/[!.]*.csv")]
        lines = {f"{path.parent.name}: {line}" for path in paths for line in path.open()}
        return {line for line in lines if FROM_OUTSIDE not in line}  # these are measured again

    def rows(self) -> dict[str, str]:
        """Return the status of each row; raises StoreError for a table that is not valid."""
        statuses = {}
        for table in SECTIONS:
            for row in read_section(table, self.folder / "data").get("cpu", []):
                key = " ".join([table, *(row[column] for column in SECTIONS[table].key)])
                is_outside = row.get("note", "").startswith(FROM_OUTSIDE)
                statuses[key] = FROM_OUTSIDE if is_outside else row["status"]
        return statuses

    def unlike(self, whole: dict, allowed: str = "") -> list[str]:
        """Wait for the end; return how it differs from a whole run, but for a status `allowed`."""
        if not self.has_ended(120 + 6 * whole["seconds"]):
            return ["does not end"]
        faults = [f"ended with {self.process.returncode}"] if self.process.returncode else []
        rows = self.rows()
        other = {key for key, _ in rows.items() ^ whole["rows"].items()}
        return faults + [f"{key}: {rows.get(key)}" for key in other if rows.get(key) != allowed]


def role_of(command: str, is_ranked: bool) -> str:
    """Return what a process is by its command, "" if it is none of those that are killed."""
    for words, role in COMMANDS.items():
        if words in command:
            return "rank" if role == "worker" and is_ranked else role
    return ""


def kill(run: NotebookRun, after_s: float, chance: random.Random) -> tuple[str, list[str]]:
    """Kill a process after some seconds; return its role, "" if there was none, and the faults."""
    if run.has_ended(after_s):
        return "", []
    living, before = run.living(), run.lines()
    workers = {pid for pid, role in living.items() if role in WORKERS}
    roles = {living[pid] for pid in workers} if workers and chance.random() < 0.7 else {*ENDS_ALL}
    victim = chance.choice(sorted(roles & {*living.values()}))
    numbers = [signal.SIGKILL] * 3 + [signal.SIGTERM] + [signal.SIGINT] * (victim == "papermill")
    pid, number = chance.choice([p for p in living if living[p] == victim]), chance.choice(numbers)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    begin = time.monotonic()
    faults = run.left(None if victim in ENDS_ALL else workers)
    gone_s = time.monotonic() - begin
    told = f"{victim} {number.name}, gone in {gone_s:.1f} s, {len(before)} lines"
    print(f"  {after_s:.0f} s: {told}", flush=True)
    return victim, faults + [f"lost: {line}" for line in before - run.lines()]


def kill_some(name: str, folder: Path, whole: dict, chance: random.Random) -> list[str]:
    """Run the notebook, kill processes of it until it ends, and return the faults."""
    run = NotebookRun(name, folder)
    try:
        victim, faults = kill(run, whole["seconds"] * chance.random(), chance)
        for _ in range(MOST_KILLS - 1):
            if victim in WORKERS:
                victim, more = kill(run, whole["seconds"] * chance.random() / 3, chance)
                faults += more
        if victim not in ENDS_ALL:
            faults += run.unlike(whole, FROM_OUTSIDE)
        before = run.lines()
        if victim in ENDS_ALL or FROM_OUTSIDE in run.rows().values():
            run = NotebookRun(name, folder)
            faults += run.unlike(whole)
        faults += [f"lost: {line}" for line in before - run.lines()] + run.left()
        return faults + [f"left: {path}" for path in (folder / "tmp").glob("a2lib-sweep-*")]
    finally:
        for pid in run.living():
            os.kill(pid, signal.SIGKILL)


def run_whole(name: str, folder: Path) -> dict:
    """Run a notebook to its end; return its seconds and the status of each row."""
    begin, run = time.monotonic(), NotebookRun(name, folder)
    if not run.has_ended(1200) or run.process.returncode:
        raise SystemExit(f"{name} does not end well: {folder}/log")
    return {"seconds": time.monotonic() - begin, "rows": run.rows()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=42)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--notebooks", nargs="*", default=NOTEBOOKS, choices=NOTEBOOKS)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    place = ROOT / "build" / "kills"
    for number in range(asked.first, asked.runs):
        name = asked.notebooks[number % len(asked.notebooks)]
        kept, folder = place / f"{name}.json", place / f"{asked.seed}-{number}"
        if not kept.exists():
            whole = run_whole(name, place / name)
            kept.write_text(json.dumps(whole))
        print(f"{number} {name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        chance = random.Random(f"{asked.seed} {number}")
        faults = kill_some(name, folder, json.loads(kept.read_text()), chance)
        print("  FAULT" if faults else "  ok", *faults, sep="\n    ", flush=True)
        if not faults:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
