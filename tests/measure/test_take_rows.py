"""dev/take_rows.py: the newer row of each key, its run with it, and nothing else."""

import runpy
from types import SimpleNamespace

import pytest

from a2lib.measure import FLASH, Store, StoreError, bulk
from a2lib.measure.runs import COLUMNS, read_runs, runs_table
from a2lib.paths import ROOT

KEY = dict.fromkeys(FLASH.key, "1") | {"implementation": "a2lib", "causal": "true"}


take_rows = SimpleNamespace(**runpy.run_path(ROOT / "dev" / "take_rows.py"))


def measured(data, started, rows, device="gpu"):
    """A run that began at ``started`` and its rows, {pass: ms}."""
    run = f"run-{started}"
    row = dict.fromkeys(COLUMNS, "") | {"run": run, "started": started, "device": device}
    runs_table(data).put(row | {"n_devices": "1", "parameters": "{}"})
    store = Store(FLASH, device, data)
    for name, ms in rows.items():
        store.put({**KEY, "pass": name, "status": "ok", "ms": ms, "n": 3, "run": run})


def times(data, device="gpu"):
    return {row["pass"]: row["ms"] for row in Store(FLASH, device, data).rows()}


def test_newer_rows_and_their_runs(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    measured(here, "2026-01-02", {"forward": 2, "backward": 2})
    measured(there, "2026-01-01", {"forward": 1})  # older
    measured(there, "2026-01-03", {"backward": 3, "end_to_end": 3})
    measured(there, "2026-01-04", {"forward": 4}, device="other")
    measured(there, "2026-01-05", {})
    assert take_rows.main([str(there), "--into", str(here)]) == 0
    assert times(here) == {"forward": "2", "backward": "3", "end_to_end": "3"}
    assert times(here, "other") == {"forward": "4"}
    runs = [run["started"] for run in read_runs(here)]
    assert runs == ["2026-01-02", "2026-01-03", "2026-01-04"]
    assert "flash, gpu: 2 rows" in capsys.readouterr().out
    assert take_rows.take(there, here) == {}


def test_what_is_no_data_folder(tmp_path, capsys):
    assert take_rows.main([str(tmp_path)]) == 1
    assert "no measured/runs.csv" in capsys.readouterr().err
    with pytest.raises(StoreError):
        take_rows.take(tmp_path / "nowhere", tmp_path)


def picture(data, started, name, value):
    """A picture of a run that ``measured`` knows."""
    row = {"start_us": value, "duration_us": 1, "stream": "7"}
    row |= {"kind": "copy", "phase": "forward", "part": ""}
    bulk.put("strip", "gpu", name, [row], run=f"run-{started}", about={}, data=data)


def test_newer_pictures_and_their_runs(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    for data, started in ((here, "2026-01-02"), (there, "2026-01-01"), (there, "2026-01-03")):
        measured(data, started, {})
    picture(here, "2026-01-02", "a", 2)
    picture(here, "2026-01-02", "b", 2)
    picture(there, "2026-01-01", "a", 1)
    picture(there, "2026-01-03", "b", 3)
    picture(there, "2026-01-03", "c", 3)
    assert take_rows.main([str(there), "--into", str(here)]) == 0
    found = {name: bulk.read("strip", "gpu", name, here) for name in "abc"}
    assert [one.rows[0]["start_us"] for one in found.values()] == [2, 3, 3]
    assert found["c"].run in {run["run"] for run in read_runs(here)}
    assert "bulk strip, gpu: 2 pictures" in capsys.readouterr().out
    assert take_rows.take(there, here) == {}
