"""Measurements beside the sweep: resumed by key, and a worker that dies leaves rows."""

import sys

import pytest

from a2lib.experiments import units
from a2lib.experiments.process import WorkerDied
from a2lib.measure import FLASH_ACCURACY, Store, StoreError, start_run

# Stores what its unit says, after it has died, hung or failed where it is told to.
PLAYER = """
import json, os, signal, sys, time
from pathlib import Path
from a2lib.measure import FLASH_ACCURACY, Store
print('{"ready": true}', flush=True)
for line in sys.stdin:
    task = json.loads(line)
    part = task["unit"].get("part")
    for i, key in enumerate(task["unit"]["keys"]):
        if part == "die" and i == 1: os.kill(os.getpid(), signal.SIGABRT)
        if part == "hang": time.sleep(600)
        if part == "full":
            print('{"fatal": "disk full"}', flush=True)
            os._exit(3)
        if part == "silent": continue
        row = {**key, "status": "ok", "error": 0.5, "note": str(os.getpid()), "run": task["run"]}
        Store(FLASH_ACCURACY, task["slug"], data=Path(task["data"])).put(row)
        print(json.dumps({"row": row}), flush=True)
    print('{"done": true}', flush=True)
"""
COMMAND = [sys.executable, "-c", PLAYER]


@pytest.fixture
def accuracy(tmp_path):
    return Store(FLASH_ACCURACY, "cpu", data=tmp_path / "data")


def new_run(store):
    return start_run(command="test", parameters={}, device="cpu", data=store.data)


def unit(name, part=None):
    key = {
        "implementation": name, "dtype": "bf16", "batch": 1, "heads": 1, "seq_len": 8,
        "head_dim": 8, "causal": True, "score_scale": 1,
    }  # fmt: skip
    return {"title": name, "part": part, "keys": [key | {"tensor": t} for t in ("o", "dq")]}


def measure(store, made, run, **options):
    settings = {"do": "play", "store": store, "run": run, "device": "cpu", "seed": 0}
    return units.measure(made, **settings, silence_s=30, command=COMMAND, **options)


def found(store):
    return {(r["implementation"], r["tensor"]): (r["status"], r["note"]) for r in store.rows()}


def test_every_unit_is_measured_by_one_worker_and_announced(accuracy):
    log = []
    made = [unit("a"), unit("b")]
    options = {"begin": lambda u: log.append(u["title"]), "step": lambda u: log.append("done")}
    assert measure(accuracy, made, new_run(accuracy), **options) == 0
    assert log == ["a", "done", "b", "done"]
    assert {status for status, _ in found(accuracy).values()} == {"ok"}
    assert len(found(accuracy)) == 4 and len({note for _, note in found(accuracy).values()}) == 1


def test_what_is_stored_is_left_out_unless_remeasured(accuracy):
    made = [unit("a"), unit("b")]
    assert units.pending(made, accuracy, remeasure=False) == made
    measure(accuracy, made[:1], new_run(accuracy))
    assert units.pending(made, accuracy, remeasure=False) == made[1:]
    assert units.pending(made, accuracy, remeasure=True) == made


@pytest.mark.parametrize(
    "part, statuses, reason",
    [
        ("die", {"o": "ok", "dq": "error"}, "its process died (killed by SIGABRT)"),
        ("silent", {"o": "error", "dq": "error"}, "no result and no reason"),
    ],
)
def test_a_worker_that_dies_or_says_nothing_leaves_rows(accuracy, part, statuses, reason):
    measure(accuracy, [unit("bad", part), unit("good")], new_run(accuracy))
    rows = found(accuracy)
    assert {t: rows["bad", t][0] for t in ("o", "dq")} == statuses
    assert reason in rows["bad", "dq"][1]
    assert rows["good", "o"][0] == rows["good", "dq"][0] == "ok"


def test_a_worker_that_hangs_is_ended(accuracy):
    measure_hanging = {"do": "play", "store": accuracy, "device": "cpu", "seed": 0}
    units.measure(
        [unit("bad", "hang")],
        **measure_hanging,
        run=new_run(accuracy),
        silence_s=0.5,
        command=COMMAND,
    )
    assert {note for _, note in found(accuracy).values()} == {"no answer within 0.5 s"}


def test_an_old_row_does_not_hide_that_measuring_again_failed(accuracy):
    measure(accuracy, [unit("a")], new_run(accuracy))
    measure(accuracy, [unit("a", "silent")], new_run(accuracy))
    assert {status for status, _ in found(accuracy).values()} == {"error"}


def test_nothing_is_started_after_the_limit(accuracy):
    made = [unit("a"), unit("b")]
    assert measure(accuracy, made, new_run(accuracy), until=0.0) == 4 and not accuracy.rows()


def test_a_full_disk_ends_it(accuracy):
    with pytest.raises(StoreError, match="disk full"):
        measure(accuracy, [unit("a", "full"), unit("b")], new_run(accuracy))


def test_a_worker_that_does_not_start_ends_it(accuracy):
    options = {"do": "play", "store": accuracy, "device": "cpu", "seed": 0, "silence_s": 30}
    with pytest.raises(WorkerDied):
        command = [sys.executable, "-c", "raise SystemExit(4)"]
        units.measure([unit("a")], **options, run=new_run(accuracy), command=command)
