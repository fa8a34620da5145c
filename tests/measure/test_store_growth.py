"""A section that gains a column, and one without times: no row is lost or refused."""

import csv

import pytest

from a2lib.measure import CEILING, FLASH, FLASH_ACCURACY, SECTIONS, Store, StoreError, read_section

BEFORE = [c for c in FLASH.columns if c not in ("ms_graph", "ms_host", "sm_mhz")]


def written_before(store, rows, columns=BEFORE):
    """The file of ``store`` as code wrote it that knew ``columns`` alone."""
    store.path.parent.mkdir(parents=True, exist_ok=True)
    with open(store.path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"causal": "true", **row} for row in rows)


def old_rows(make_row):
    note = 'a "note", quoted'
    return [make_row(seq_len=n, causal="true", note=note, peak_bytes=n) for n in (128, 256)]


def test_a_file_without_newer_columns_is_read_with_blanks(store, data, make_row):
    written_before(store, old_rows(make_row))
    content = store.path.read_bytes()
    assert [(r["seq_len"], r["ms"], r["ms_graph"]) for r in store.rows()] == [
        ("128", "1.5", ""),
        ("256", "1.5", ""),
    ]
    assert store.get(make_row())["peak_bytes"] == "128"
    assert read_section("flash", data)["cpu"] == store.rows()
    store.check_writable()
    assert store.path.read_bytes() == content


def test_the_next_row_upgrades_the_file_and_keeps_the_others(store, make_row):
    written_before(store, old_rows(make_row))
    before = store.rows()
    reader = Store(FLASH, "cpu", store.data)
    assert reader.rows() == before
    store.put(make_row(seq_len=512, ms_graph=0.25, ms_host=0.125, sm_mhz=1980))
    for each in (store, reader, Store(FLASH, "cpu", store.data)):
        assert each.rows()[:2] == before
        assert (each.rows()[2]["ms_graph"], each.rows()[2]["sm_mhz"]) == ("0.25", "1980")
    assert store.path.read_text().splitlines()[0] == ",".join(FLASH.columns)


def test_replacing_the_only_row_of_an_old_file(store, make_row):
    written_before(store, old_rows(make_row)[:1])
    store.put(make_row(ms=1.625))
    assert [row["ms"] for row in store.rows()] == ["1.625"]


def test_a_reader_of_the_new_file_reads_an_old_one_put_in_its_place(store, make_row):
    store.put(make_row())
    store.rows()
    written_before(store, old_rows(make_row))
    assert [row["seq_len"] for row in store.rows()] == ["128", "256"]


@pytest.mark.parametrize("absent", [("note",), ("peak_bytes", "note"), FLASH.values])
def test_any_value_may_be_missing(store, make_row, absent):
    written_before(store, old_rows(make_row), [c for c in FLASH.columns if c not in absent])
    assert len(store.rows()) == 2
    assert {store.rows()[0][column] for column in absent} == {""}


@pytest.mark.parametrize(
    "columns",
    [
        [c for c in BEFORE if c != "seq_len"],
        [c for c in BEFORE if c != "run"],
        [*BEFORE, "speed"],
        ["speed" if c == "peak_bytes" else c for c in BEFORE],
        [*BEFORE[:8], "note", "peak_bytes", *BEFORE[10:]],
        [*BEFORE[:8], "note", "note", *BEFORE[10:]],
    ],
)
def test_any_other_header_is_refused_and_left_alone(store, make_row, columns):
    written_before(store, old_rows(make_row), columns)
    content = store.path.read_bytes()
    for call in (store.rows, store.check_writable, lambda: store.put(make_row(seq_len=512))):
        with pytest.raises(StoreError, match=r"cpu\.csv:1: the header is"):
            call()
    assert store.path.read_bytes() == content


def test_lines_of_the_new_header_under_the_old_are_refused(store, make_row):
    """What a merge by hand of two versions leaves."""
    store.put(make_row())
    new = store.path.read_text().splitlines()[1]
    written_before(store, old_rows(make_row))
    store.path.write_text(f"{store.path.read_text()}{new}\n")
    with pytest.raises(StoreError, match=r"cpu\.csv:4: 19 fields, not 16"):
        store.rows()


KEY = {
    "implementation": "a2lib", "dtype": "bf16", "batch": 1, "heads": 4, "seq_len": 64,
    "head_dim": 64, "causal": True, "score_scale": 10, "tensor": "dq",
}  # fmt: skip


@pytest.fixture
def accuracy(data):
    return Store(FLASH_ACCURACY, "cpu", data)


def test_an_untimed_section_needs_a_result_and_no_time(accuracy, make_row):
    run = make_row()["run"]
    accuracy.put(KEY | {"status": "ok", "error": 0.0, "error_max": 1.23456789e-9, "run": run})
    (row,) = accuracy.rows()
    assert (row["error"], row["error_max"], row["ms"]) == ("0.0", "1.23457e-09", "")
    accuracy.put(KEY | {"tensor": "o", "status": "oom", "note": "out of memory", "run": run})
    assert len(accuracy.rows()) == 2


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"status": "ok", "note": "nothing"}, "status is ok but error, error_max are blank"),
        ({"status": "error", "error": 1.0}, "error is given, but status is error"),
        ({"status": "ok", "error": -1.0}, "error is '-1.0', not a number of at least 0"),
        ({"status": "ok", "error": float("nan")}, "error is nan, not a finite number"),
        ({"status": "ok", "error": 1.0, "score_scale": 1.5}, "score_scale is '1.5'"),
    ],
)
def test_an_untimed_row_that_is_not_valid_is_refused(accuracy, make_row, columns, message):
    with pytest.raises(StoreError) as raised:
        accuracy.put(KEY | {"run": make_row()["run"]} | columns)
    assert message in str(raised.value) and not accuracy.path.exists()


def test_every_section_can_say_why_there_is_no_result():
    for section in SECTIONS.values():
        assert section.values[-1] == "note" and len(set(section.key)) == len(section.key)
    assert "sm_mhz" in CEILING.values
