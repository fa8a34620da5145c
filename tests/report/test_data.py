import csv

import pytest

from a2lib.measure.store import StoreError
from a2lib.report import data
from a2lib.report.pages.flash import SHAPE


def rewrite(file, change):
    """Pass every row of a CSV through `change`."""
    with open(file, newline="") as handle:
        rows = list(csv.DictReader(handle))
    with open(file, "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(change(dict(row)) for row in rows)


def test_rows_come_with_types_device_and_origin(complete):
    rows = data.load("flash", [complete])
    assert set(rows["device"]) == {"nvidia-h200"} and not rows["local"].any()
    assert rows["causal"].dtype == bool and set(rows["causal"]) == {True, False}
    assert rows.loc[rows["status"] != "ok", "ms"].isna().all()
    assert rows.loc[rows["status"] == "ok", "ms"].gt(0).all()
    assert {"ok", "oom", "unsupported"} == set(rows["status"])


def test_nothing_measured_gives_empty_tables_of_the_same_columns(complete, tmp_path):
    empty, full = data.load("flash", [tmp_path]), data.load("flash", [complete])
    assert len(empty) == 0 and list(empty.columns) == list(full.columns)
    assert len(data.load_runs([tmp_path])) == 0


def test_a_row_without_its_run_is_refused(synthetic, tmp_path):
    synthetic.write(tmp_path, keep=lambda shape: shape[4] == 128)
    rewrite(data.section_file(tmp_path, "flash", "nvidia-h200"), lambda row: row | {"run": "gone"})
    with pytest.raises(StoreError, match="gone.*runs.csv"):
        data.load("flash", [tmp_path])


def test_other_devices_and_other_roots_are_local(synthetic, complete, tmp_path):
    synthetic.write(tmp_path, device="cpu", keep=lambda shape: shape[4] == 128, ceiling=False)
    synthetic.write(tmp_path, keep=lambda shape: shape[4] == 128, ceiling=False)
    rows = data.load("flash", [complete, tmp_path])
    local = rows[rows["local"]]
    assert set(local["device"]) == {"cpu", "nvidia-h200"}
    assert all(str(tmp_path) in file for file in local["file"])
    assert len(data.load_runs([complete, tmp_path])) == 2


def test_a_moved_data_folder_is_the_only_one_read(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "build_dir", lambda: tmp_path)
    (tmp_path / "data").mkdir()
    monkeypatch.delenv("A2LIB_DATA", raising=False)
    assert data.data_roots()[1:] == [tmp_path / "data"]
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "mine"))
    assert data.data_roots() == [tmp_path / "mine"]


def test_published_figures_are_whole_and_name_their_source():
    rows = data.load_reference("flash", numbers=("speedup_over_eager",))
    h800 = rows[rows["device"] == "H800"]
    # 10 lengths x 4 head sizes x 2 dtypes x 3 passes x 2 implementations
    assert len(h800) == 480 and not h800.duplicated(["implementation", *SHAPE]).any()
    lost = h800[h800["status"] == "oom"]
    assert len(lost) == 12 and set(lost["implementation"]) == {"eager"}
    assert set(lost["dtype"]) == {"fp32"} and set(lost["seq_len"]) == {65536}
    best = rows[rows["implementation"] == "leaderboard_2025_best"]
    assert list(best["ms"]) == [5.364] and list(best["device"]) == ["H100"]
    # The printed ratio agrees with the printed times as far as their two decimals go.
    times = h800.pivot_table(index=SHAPE, columns="implementation", values="ms").dropna()
    printed = h800.set_index(SHAPE)["speedup_over_eager"].dropna().reindex(times.index)
    eager, tiled = times["eager"], times["triton_forward_compiled_backward"]
    slack = 0.0051
    assert (printed <= (eager + slack) / (tiled - slack).clip(lower=1e-4) + slack).all()
    assert (printed >= (eager - slack) / (tiled + slack) - slack).all()
