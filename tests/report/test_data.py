"""Rows as typed tables: which are read, which are the reader's own, and what cannot be shown."""

import invented_rows
import pytest
from invented_rows import BLANK, flash

from a2lib.lab import StoreError
from a2lib.report import data
from a2lib.report.pages.collectives import HOSTS, published
from a2lib.report.pages.flash import SHAPE


@pytest.fixture
def complete(tmp_path):
    """Return a data folder with a few rows of the published device."""
    oom = flash(seq_len=65536, **BLANK) | {"status": "oom", "note": "out of memory"}
    refused = flash("sdpa_cudnn", dtype="fp32", **BLANK) | {"status": "unsupported"}
    rows = [flash(), flash("a2lib", 256, causal="false"), oom, refused]
    return invented_rows.write(tmp_path / "complete", flash=rows)


def test_rows_come_with_types_device_and_origin(complete):
    rows = data.load("flash", [complete])
    assert set(rows["device"]) == {"nvidia-h200"} and not rows["local"].any()
    assert rows["causal"].dtype == bool and set(rows["causal"]) == {True, False}
    assert rows.loc[rows["status"] != "ok", "ms"].isna().all()
    assert rows.loc[rows["status"] == "ok", "ms"].gt(0).all()
    assert {"ok", "oom", "unsupported"} == set(rows["status"])


NO_RUN = flash(run="gone"), r"cpu\.csv:2: run 'gone' is not in runs\.csv"
NO_NUMBER = flash(seq_len=10**30), r"cpu\.csv:2: seq_len is '\d+', not a whole number"


@pytest.mark.parametrize(("row", "complaint"), [NO_RUN, NO_NUMBER])
def test_a_row_that_cannot_be_shown_is_named(tmp_path, row, complaint):
    invented_rows.write(tmp_path, device="cpu", flash=[row])
    with pytest.raises(StoreError, match=complaint):
        data.load("flash", [tmp_path])


def test_other_devices_and_other_roots_are_local(complete, tmp_path):
    for device in ("cpu", "nvidia-h200"):
        invented_rows.write(tmp_path / "here", device=device, flash=[flash()])
    rows = data.load("flash", [complete, tmp_path / "here"])
    local = rows[rows["local"]]
    assert set(local["device"]) == {"cpu", "nvidia-h200"}
    assert all(str(tmp_path / "here") in file for file in local["file"])
    assert len(data.load_runs([complete, tmp_path / "here"])) == 2


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


def test_a_published_table_that_cannot_be_shown(tmp_path):
    (tmp_path / "reference").mkdir()
    for content, complaint in (
        ("seq_len,device,source\n16,a,b\nmany,a,b\n", r"x\.csv: seq_len: .*many"),
        ("ms,device,source\n1.5,a,\n", r"x\.csv:2: .*source"),
    ):
        (tmp_path / "reference" / "x.csv").write_text(content)
        with pytest.raises(data.ReportError, match=complaint):
            data.load_reference("x", tmp_path)


def test_what_the_page_on_collectives_says_of_more_gpus_by_published_times():
    rows = published(data.load_reference("collectives")).query("backend == 'nccl'")
    times = rows.set_index(["device", "size", "world_size"])["ms"].sort_index()
    for device in HOSTS:
        for _, host in times[device].groupby("size"):
            two_and_six = host.droplevel("size")
            assert two_and_six[6] < 1.67 * two_and_six[2]
    largest = rows[rows["size"] > 9e8].set_index(["device", "world_size"])["bus"]
    for device in (*HOSTS, "host of six L4"):
        assert largest[device].min() == largest[device, 2]
    assert largest["RTX 5090, PCIe", 6] < largest["RTX 5090, PCIe", 2]
