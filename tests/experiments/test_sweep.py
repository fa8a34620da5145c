"""A sweep: resumed where it stopped, and stopped by nothing that a configuration does."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from a2lib.experiments import memory
from a2lib.experiments.process import Worker, WorkerDied
from a2lib.experiments.shapes import Parameters, Shape
from a2lib.experiments.sweep import Sweep, Task, plan
from a2lib.measure import StoreError, start_run
from a2lib.theory.attention import PASSES

SHAPES = [Shape("fp32", 1, 1, n, 16, True) for n in (8, 16, 32)]


def tasks(*names, shapes=SHAPES):
    return [Task(shape, dict.fromkeys(names, PASSES)) for shape in shapes]


def found(store):
    """{(implementation, seq_len): the statuses of its passes}"""
    grouped = {}
    for row in store.rows():
        grouped.setdefault((row["implementation"], int(row["seq_len"])), {})[row["pass"]] = row
    return {key: [rows[p]["status"] for p in PASSES if p in rows] for key, rows in grouped.items()}


def test_every_row_is_stored_and_reported(store, run, play):
    seen = []
    sweep = Sweep(store, run, "cpu", row=seen.append, command=play())
    assert sweep.measure(tasks("eager", "sdpa_flash")) == 0
    assert len(seen) == len(store.rows()) == 18
    assert {row["run"] for row in store.rows()} == {run}


@pytest.mark.parametrize(
    "part, statuses, note",
    [
        ("die", ["ok", "error", "error"], "SIGABRT"),
        ("killed", ["error"] * 3, "ended from outside, twice: its process died (killed"),
        ("hang", ["error"] * 3, "no answer within"),
        ("lost", ["error"] * 3, "CUDA error"),
    ],
)
def test_a_process_that_ends_is_a_row_and_the_sweep_goes_on(store, run, play, part, statuses, note):
    sweep = Sweep(store, run, "cpu", command=play(eager=part), silence_s=2)
    left = sweep.measure(tasks("tiled", "eager", "sdpa_flash", shapes=SHAPES[:2]))
    assert left == 0
    for shape in SHAPES[:2]:
        assert found(store)["eager", shape.seq_len] == statuses
        for other in ("tiled", "sdpa_flash"):
            assert found(store)[other, shape.seq_len] == ["ok"] * 3
    notes = [row["note"] for row in store.rows() if row["status"] not in ("ok",)]
    assert all(note in text and "\n" not in text for text in notes)


def test_a_kill_from_outside_is_no_result(store, run, play, tmp_path):
    part = play(eager="killed once", log=str(tmp_path / "killed"))
    assert Sweep(store, run, "cpu", command=part).measure(tasks("eager", shapes=SHAPES[:1])) == 0
    assert found(store) == {("eager", 8): ["ok"] * 3} and (tmp_path / "killed").exists()


def test_what_was_ended_from_outside_twice_is_measured_by_the_next_sweep(store, run, play):
    (task,) = plan(SMALL, "cpu", store)
    Sweep(store, run, "cpu", command=play(eager="killed", tiled="die")).measure([task])
    assert {row["status"] for row in store.rows()} == {"ok", "error"} and len(store.rows()) == 6
    (rest,) = plan(SMALL, "cpu", store)
    assert rest.wanted == {"eager": PASSES}


@pytest.mark.parametrize("evidence", ["counted", "little left"])
def test_a_kill_is_out_of_memory_where_the_system_says_so(store, run, play, monkeypatch, evidence):
    if evidence == "counted":
        counted = iter(range(100))
        monkeypatch.setattr(memory, "oom_kills", lambda: next(counted))
    else:
        free = iter([2**34])
        monkeypatch.setattr(memory, "_free_on_host", lambda: next(free, 2**28))
    sweep = Sweep(store, run, "cpu", command=play(eager="killed"))
    sweep.measure(tasks("eager", shapes=SHAPES[:1]))
    assert found(store) == {("eager", 8): ["oom"] * 3}
    word = "counts a kill for want of memory" if evidence == "counted" else "0.25 GiB of memory"
    assert all(word in row["note"] and "SIGKILL" in row["note"] for row in store.rows())


def test_who_dies_while_taking_turns_is_found_by_measuring_each_alone(store, run, play):
    Sweep(store, run, "cpu", command=play(turns=True, eager="die")).measure(tasks("tiled", "eager"))
    assert {found(store)["tiled", s.seq_len] == ["ok"] * 3 for s in SHAPES} == {True}
    assert {tuple(found(store)["eager", s.seq_len]) for s in SHAPES} == {("ok", "error", "error")}


def test_a_process_that_ends_between_rows_blames_nobody(store, run, play):
    Sweep(store, run, "cpu", command=play(tiled="end")).measure(tasks("tiled", "eager"))
    assert {tuple(s) for s in found(store).values()} == {("ok",) * 3} and len(found(store)) == 6


def test_a_worker_that_does_not_start_is_no_row(store, run, play):
    with pytest.raises(WorkerDied, match="cannot start"):
        Sweep(store, run, "cpu", command=play(start="die")).measure(tasks("eager"))
    assert store.rows() == []


def test_a_full_disk_ends_the_sweep(store, run, play):
    with pytest.raises(StoreError, match="disk full"):
        Sweep(store, run, "cpu", command=play(eager="full")).measure(tasks("tiled", "eager"))
    assert found(store) == {("tiled", 8): ["ok"] * 3}


def test_the_time_limit_stops_between_configurations_and_counts(store, run, play):
    sweep = Sweep(store, run, "cpu", until=time.time() + 1.5, command=play(seconds=0.2))
    left = sweep.measure(tasks("tiled", "eager", "sdpa_flash"))
    stored = found(store)
    assert 0 < left < 27 and left == 27 - len(store.rows())
    assert all(statuses == ["ok"] * 3 for statuses in stored.values())
    assert (
        Sweep(store, run, "cpu", until=time.time() - 1, command=["no-such"]).measure(tasks("eager"))
        == 9
    )


SMALL = Parameters(sweep="leaderboard", implementations="eager,tiled")


def test_a_sweep_is_resumed_and_a_shape_is_not(store, run, play):
    (task,) = plan(SMALL, "cpu", store)
    assert task.size == 6
    Sweep(store, run, "cpu", command=play()).measure([task.without({("eager", "backward")})])
    (rest,) = plan(SMALL, "cpu", store)
    assert rest.wanted == {"eager": ("backward",)}
    Sweep(store, run, "cpu", command=play(eager="die")).measure([rest])
    assert plan(SMALL, "cpu", store) == []
    single = Parameters(seq_len=256, heads=2, dtype="bf16", implementations="eager,tiled")
    assert single.shapes("cpu") == SMALL.shapes("cpu")
    assert plan(single, "cpu", store)[0].size == 6


def test_remeasuring_begins_with_the_oldest(store, run, play):
    sweep = Parameters(sweep="fa3", implementations="eager", passes="forward", remeasure=True)
    everything = plan(sweep, "cpu", store)
    Sweep(store, run, "cpu", command=play()).measure(everything)
    again = plan(sweep, "cpu", store)
    assert len(again) == len(everything) > 3
    time.sleep(1.1)  # a run's id begins with the second it was started in
    later = start_run(command="later", parameters={}, device="cpu", data=store.data)
    Sweep(store, later, "cpu", command=play()).measure(again[:2])
    assert plan(sweep, "cpu", store)[-2:] == again[:2]


def test_a_shape_remeasured_in_part_is_as_old_as_its_oldest_row(store, run, play):
    sweep = Parameters(sweep="fa3", implementations="eager,tiled", passes="forward", remeasure=True)
    Sweep(store, run, "cpu", command=play()).measure(plan(sweep, "cpu", store))
    again = plan(sweep, "cpu", store)
    time.sleep(1.1)
    later = start_run(command="later", parameters={}, device="cpu", data=store.data)
    part = again[0].without({("tiled", "forward")})
    Sweep(store, later, "cpu", command=play()).measure([part])
    assert plan(sweep, "cpu", store) == again


def test_a_killed_sweep_keeps_its_rows_and_the_next_goes_on(store, run, play, tmp_path):
    worker = play(seconds=0.1)
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from a2lib.experiments.shapes import Parameters
        from a2lib.experiments.sweep import Sweep, plan
        from a2lib.measure import FLASH, Store
        store = Store(FLASH, "cpu", data=Path({str(store.data)!r}))
        sweep = Sweep(store, {run!r}, "cpu", command={worker!r})
        sweep.begin = lambda *_: print("begun", flush=True)
        sweep.measure(plan(Parameters(sweep="fa3", implementations="eager,tiled"), "cpu", store))
    """)
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as going:
        for _ in range(3):
            going.stdout.readline()
        going.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    kept = store.rows()
    wanted = Parameters(sweep="fa3", implementations="eager,tiled")
    rest = plan(wanted, "cpu", store)
    total = len(wanted.shapes("cpu")) * 6
    assert 3 <= len(kept) < total and sum(t.size for t in rest) == total - len(kept)
    later = start_run(command="later", parameters={}, device="cpu", data=store.data)
    Sweep(store, later, "cpu", command=play()).measure(rest)
    assert [row for row in store.rows() if row["run"] == run] == kept
    assert len(store.rows()) == total


# A worker with a process of its own, as a compiler is: {"do": "start"} -> {"pid": ...}
STARTING = """
import subprocess, sys, time
from a2lib.experiments import worker
def start(task, emit):
    emit({"pid": subprocess.Popen(["sleep", "600"]).pid})
    time.sleep(task["seconds"])
worker.HANDLERS["start"] = start
worker.main()
"""


def test_closing_a_worker_ends_what_it_started():
    worker = Worker([sys.executable, "-c", STARTING])
    (event,) = worker.ask({"do": "start", "seconds": 0}, 60)
    assert not _ended(event["pid"])
    worker.close()
    try:
        assert _ends(event["pid"])
    finally:
        _kill(event["pid"])


def test_neither_a_worker_nor_what_it_started_outlives_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from a2lib.experiments.process import Worker
        worker = Worker([sys.executable, "-c", {STARTING!r}])
        for event in worker.ask({{"do": "start", "seconds": 100}}, 120):
            print(worker._process.pid, event["pid"], flush=True)
    """)
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(_ended, pids))
        parent.send_signal(signal.SIGKILL)
    try:
        assert all(map(_ends, pids))
    finally:
        for pid in pids:
            _kill(pid)


def _ends(pid):
    """Whether a process ends by itself within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not _ended(pid):
        time.sleep(0.05)
    return _ended(pid)


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or read
        return True
