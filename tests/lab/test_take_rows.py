"""dev/take_rows.py: the newer row and picture of each key, its run with it, and nothing else."""

import runpy
from types import SimpleNamespace

from tables import values

from a2lib.lab import SECTIONS, Table, bulk
from a2lib.lab.runs import COLUMNS, read_runs, runs_table
from a2lib.paths import ROOT

KEY = dict.fromkeys(SECTIONS["flash"].key, "1") | {"implementation": "a2lib", "causal": "true"}


take_rows = SimpleNamespace(**runpy.run_path(ROOT / "dev" / "take_rows.py"))


def measured(data, day, passes=(), pictures="", device="gpu"):
    """A run of that day; the time of each of its rows, and what each of its pictures has, is the
    day."""
    run = f"run-{day}"
    row = dict.fromkeys(COLUMNS, "") | {"run": run, "started": f"2026-01-0{day}", "device": device}
    runs_table(data).put(row | {"n_devices": "1", "parameters": "{}"})
    for name in passes:
        result = {"status": "ok", "ms": day, "n": 3, "run": run}
        Table("flash", device, data).put({**KEY, "pass": name, **result})
    for name in pictures:
        row = {"start_us": day, "duration_us": 1, "stream": "7"}
        row |= {"kind": "copy", "phase": "forward", "part": ""}
        bulk.put("strip", device, name, [row], run=run, about={}, data=data)


def times(data, device="gpu"):
    return dict(values(Table("flash", device, data).rows(), "pass", "ms"))


def test_what_is_newer_and_its_runs(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    measured(here, 2, ["forward", "backward"], "ab")
    measured(there, 1, ["forward"], "a")  # older
    measured(there, 3, ["backward", "end_to_end"], "b")
    measured(there, 4, ["forward"], device="other")
    measured(there, 5, pictures="c")
    measured(there, 6)
    assert take_rows.main([str(there), "--into", str(here)]) == 0
    assert times(here) == {"forward": "2", "backward": "3", "end_to_end": "3"}
    assert times(here, "other") == {"forward": "4"}
    for name, day in {"a": 2, "b": 3, "c": 5}.items():
        assert bulk.read("strip", "gpu", name, here).rows[0]["start_us"] == day
    assert values(read_runs(here), "run") == ["run-2", "run-3", "run-4", "run-5"]
    printed = capsys.readouterr().out
    assert "flash, gpu: 2 rows" in printed and "bulk strip, gpu: 2 pictures" in printed
    assert take_rows.take(there, here) == {}
