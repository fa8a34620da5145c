"""A sweep: resumed where it stopped, and stopped by nothing that a configuration does."""

import time
from dataclasses import replace

import pytest
from experiments.harness.toy import SIZES, TOY, task

from a2lib.experiments.harness.process import WorkerDied
from a2lib.experiments.harness.sweep import NO_RESULT, Sweep, plan
from a2lib.lab import Store, StoreError, runs


def found(store):
    """{operation: the statuses of its sizes}"""
    grouped = {}
    for row in store.rows():
        grouped.setdefault(row["operation"], {})[int(row["size"])] = row["status"]
    return {name: [sizes[n] for n in SIZES if n in sizes] for name, sizes in grouped.items()}


def notes(store, status="error"):
    return {row["note"] for row in store.rows() if row["status"] == status}


def later(store):
    """A run that began after any: its id begins with the second."""
    run = runs.read_runs(store.data)[0] | {"run": "99990102T030405Z-cpu-000000"}
    runs.runs_table(store.data).put(run)
    return run["run"]


def test_every_row_is_stored_and_reported_by_one_process(store, run):
    seen, begun = [], []
    sweep = Sweep(store, run, "cpu", row=seen.append)
    sweep.begin = lambda task, culprit: begun.append((task.label, culprit))
    assert sweep.measure([task("a", "b", label="one"), task("c", label="two")]) == 0
    assert len(seen) == len(store.rows()) == 9
    assert begun == [("one", None), ("one", "a"), ("one", "b"), ("two", "c"), ("two", "c")]
    assert {row["run"] for row in store.rows()} == {run} and len(notes(store, "ok")) == 1


@pytest.mark.parametrize("part, statuses, note", [
    ("die late", ["ok", "error", "error"], "SIGABRT"),
    ("killed", ["error"] * 3, "ended from outside, twice: its process died (killed"),
    ("hang", ["error"] * 3, "no answer within 1 s"),
    ("lost", ["error"] * 3, "LostContext: CUDA error"),
    ("raise", ["error"] * 3, "ValueError: one"),
    ("no memory", ["oom"] * 3, "out of memory"),
    ("silent", ["error"] * 3, NO_RESULT),
    ("end", ["ok"] * 3, ""),  # between rows, which blames nobody
])  # fmt: skip
def test_whatever_fails_is_a_row_and_the_sweep_goes_on(store, run, part, statuses, note):
    sweep = Sweep(store, run, "cpu", silence_s=1)
    assert sweep.measure([task("a", "b", "c", parts={"b": part}), task("d")]) == 0
    assert found(store) == {"b": statuses} | dict.fromkeys("acd", ["ok"] * 3)
    for status in {"error", "oom"} & {*statuses}:
        assert all(note in text and "\n" not in text for text in notes(store, status))


def test_what_was_ended_from_outside_twice_is_measured_by_the_next_sweep(store, run):
    asked = task("a", "b", parts={"a": "killed", "b": "die late"})
    Sweep(store, run, "cpu").measure([asked])
    assert found(store) == {"a": ["error"] * 3, "b": ["ok", "error", "error"]}
    (rest,) = plan([asked], store)
    assert rest.rows == {"a": asked.rows["a"]}


@pytest.mark.parametrize("part", ["die", "raise"])
def test_who_fails_while_taking_turns_is_found_by_measuring_each_alone(store, run, part):
    """One culprit is known before it says anything."""
    how = {"in_turns": True, "together": part}
    Sweep(store, run, "cpu").measure(
        [task("c", **how), task("a", "b", **how, parts={"b": "die late"})]
    )
    assert found(store) == {"a": ["ok"] * 3, "b": ["ok", "error", "error"], "c": ["error"] * 3}


def test_a_worker_that_does_not_start_is_no_row(tmp_path, run):
    store = Store(replace(TOY, handler="no.such:module"), "cpu", data=tmp_path / "data")
    with pytest.raises(WorkerDied, match="died .ModuleNotFoundError: No module named 'no'.$"):
        Sweep(store, run, "cpu").measure([task("a")])
    assert store.rows() == []


def test_a_full_disk_ends_the_sweep(store, run):
    with pytest.raises(StoreError, match="disk full"):
        Sweep(store, run, "cpu").measure([task("a", "b", parts={"b": "full"}), task("c")])
    assert found(store) == {"a": ["ok"] * 3}


def test_the_time_limit_stops_between_culprits_and_counts_and_a_worker_is_kept(store, run):
    kept = Sweep(store, run, "cpu", keep=True)
    kept.measure([task("d")])
    asked = [task(*"abc", label=str(n), seconds=0.4, sizes=(n,)) for n in SIZES]
    left = Sweep(store, run, "cpu", until=time.time() + 2, worker=kept.worker).measure(asked)
    assert 0 < left < 9 and left == 12 - len(store.rows())
    assert {row["status"] for row in store.rows()} == {"ok"}
    assert len(notes(store, "ok")) == 1 and kept.worker.closed
    assert sum(t.size for t in plan(asked, store)) == left
    nothing = Sweep(store, run, "cpu", until=time.time() - 1)
    assert nothing.measure([task("a", "b")]) == 6 and nothing.worker is None


def test_a_plan_leaves_out_what_is_stored(store, run):
    asked = task("a", "b")
    assert plan([asked], store) == [asked]
    Sweep(store, run, "cpu").measure([asked.keep(lambda key: key["size"] != 2)])
    (rest,) = plan([asked], store)
    assert rest.rows == {name: ({"operation": name, "size": 2},) for name in "ab"}
    Sweep(store, run, "cpu").measure([task("a", "b", parts={"a": "die"}, sizes=(2,))])
    assert plan([asked], store) == []
    assert plan([asked], store, resume=False) == plan([asked], store, remeasure=True) == [asked]


def test_remeasuring_begins_with_the_oldest(store, run):
    """A task that was measured again in part is as old as its oldest row."""
    everything = [task(name, label=name) for name in "abcd"]
    Sweep(store, run, "cpu").measure(everything)
    assert plan(everything, store, remeasure=True) == everything
    again = [everything[0].keep(lambda key: key["size"] != 2), everything[1]]
    Sweep(store, later(store), "cpu").measure(again)
    a, b, c, d = everything
    assert plan(everything, store, remeasure=True) == [a, c, d, b]


def test_an_old_row_does_not_hide_that_measuring_again_failed(store, run):
    Sweep(store, run, "cpu").measure([task("a")])
    Sweep(store, later(store), "cpu").measure([task("a", parts={"a": "silent"})])
    assert found(store) == {"a": ["error"] * 3}


SCRIPT = """
from pathlib import Path
from experiments.harness.toy import TOY, task
from a2lib.experiments.harness.sweep import Sweep, plan
from a2lib.lab import Store
store = Store(TOY, "cpu", data=Path({data!r}))
sweep = Sweep(store, {run!r}, "cpu", row=lambda key: print("stored", flush=True))
sweep.measure(plan([task(*"abcdefgh", seconds=0.1)], store))
"""


def test_a_killed_sweep_keeps_its_rows_and_the_next_goes_on(store, run, python):
    killed = python(SCRIPT.format(data=str(store.data), run=run))
    for _ in range(3):
        killed.stdout.readline()
    killed.kill()
    time.sleep(0.5)
    kept = store.rows()
    rest = plan([task(*"abcdefgh")], store)
    assert 3 <= len(kept) < 24 and sum(t.size for t in rest) == 24 - len(kept)
    Sweep(store, later(store), "cpu").measure(rest)
    assert [row for row in store.rows() if row["run"] == run] == kept
    assert len(store.rows()) == 24
