import csv
import subprocess
import sys

import pytest

from a2lib.measure.store import StoreError
from a2lib.report import data, metrics
from a2lib.report.chapters.flash import shapes
from a2lib.report.chapters.flash.rows import published
from a2lib.report.chapters.flash.view import SHAPE
from a2lib.theory.attention import attention_flops


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


def test_the_three_slices_are_disjoint_and_are_everything(complete):
    rows = data.load("flash", [complete])
    slices = [shapes.handout(rows), shapes.leaderboard(rows), shapes.paper(rows)]
    assert sum(map(len, slices)) == len(rows)
    assert len(set().union(*(part.index for part in slices))) == len(rows)


def test_nothing_measured_gives_empty_tables_of_the_same_columns(complete, tmp_path):
    empty, full = data.load("flash", [tmp_path]), data.load("flash", [complete])
    assert len(empty) == 0 and list(empty.columns) == list(full.columns)
    assert len(shapes.handout(empty)) == len(shapes.paper(empty)) == 0
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
    rows = published()
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


def test_a_published_figure_without_a_source_is_refused(tmp_path):
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "x.csv").write_text("ms,device,source\n1.0,H100,\n")
    with pytest.raises(data.ReportError, match=r"x\.csv:2: .*source"):
        data.load_reference("x", tmp_path)


def test_rates_and_ratios(complete):
    rows = shapes.with_speedup(shapes.with_tflops(data.load("flash", [complete])))
    row = metrics.pick(shapes.leaderboard(rows), implementation="a2lib", pass_="end_to_end").iloc[0]
    flops = attention_flops(1, 16, 16384, 16384, 64, True, "end_to_end")
    assert row["tflops"] == pytest.approx(flops / (row["ms"] * 1e-3) / 1e12)
    eager = metrics.time_of(shapes.leaderboard(rows), implementation="eager", pass_="end_to_end")
    assert row["speedup"] == pytest.approx(eager / row["ms"])
    timed_eager = rows[(rows["implementation"] == "eager") & rows["ms"].notna()]
    assert timed_eager["speedup"].eq(1).all()
    assert rows.loc[rows["ms"].isna(), ["tflops", "speedup"]].isna().all(axis=None)
    ceilings = metrics.ceilings(data.load("ceiling", [complete]))
    assert ceilings["bf16"] == pytest.approx(2 * 8192**3 / 1.4e-3 / 1e12)


def test_the_fastest_of_each_shape(complete):
    rows = shapes.handout(data.load("flash", [complete]))
    best = shapes.fastest(rows)
    assert len(best) == 2 * 4 * 10 * 3
    for found in best.sample(20, random_state=0).itertuples():
        shape = dict(zip(SHAPE[:-1], found[1:7], strict=True), pass_=found[7])
        times = metrics.pick(rows, **shape).dropna(subset=["ms"]).set_index("implementation")["ms"]
        assert found.winner == times.idxmin() and found.peer == times.drop("a2lib").idxmin()
        assert found.factor == pytest.approx(times["a2lib"] / times[found.peer])


def test_the_report_imports_no_torch():
    picture = "a2lib.report.chapters.flash.readme_figure"
    code = f"import sys, a2lib.report, {picture}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
