"""The result store in one process: what it keeps, what it refuses, and in which words."""

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from a2lib.measure import CEILING, FLASH, SECTIONS, Store, StoreError, read_section
from a2lib.measure.store import format_value

KEY = {
    "implementation": "a2lib", "dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 128,
    "head_dim": 64, "causal": True, "pass": "forward",
}  # fmt: skip


def test_a_row_comes_back_as_text_and_stands_in_the_file_as_such(store, make_row):
    store.put(make_row(peak_bytes=4096))
    expected = {
        "implementation": "a2lib", "dtype": "bf16", "batch": "1", "heads": "16", "seq_len": "128",
        "head_dim": "64", "causal": "true", "pass": "forward", "peak_bytes": "4096",
        "ms_graph": "", "ms_host": "", "sm_mhz": "", "note": "",
        "status": "ok", "ms": "1.5", "ms_p20": "1.25", "ms_p80": "1.75", "n": "10",
        "run": "20260102T030405Z-cpu-000000",
    }  # fmt: skip
    assert store.rows() == [expected]
    assert store.get(KEY) == expected
    header, line = store.path.read_text().splitlines()
    assert header == ",".join(expected)
    assert line == ",".join(expected.values())
    assert store.path == store.data / "measured" / "flash" / "cpu.csv"
    assert [path.name for path in store.path.parent.iterdir()] == ["cpu.csv"]


def test_nothing_measured_is_no_rows(store):
    assert store.rows() == []
    assert store.get(KEY) is None
    assert not store.path.exists()


def test_measuring_again_replaces_that_row_alone(store, make_row):
    for seq_len in (128, 256, 512):
        store.put(make_row(seq_len=seq_len))
    before = store.rows()
    store.put(make_row(seq_len=256, ms=1.625, note="again"))
    after = store.rows()
    assert [row["seq_len"] for row in after] == ["128", "256", "512"]
    assert after[1]["ms"] == "1.625" and after[1]["note"] == "again"
    assert (after[0], after[2]) == (before[0], before[2])


def test_rows_are_sorted_by_key_and_numbers_as_numbers(store, make_row):
    for seq_len in (1024, 128, 65536, 512):
        store.put(make_row(seq_len=seq_len))
    store.put(make_row(implementation="Eager", seq_len=9))
    assert [row["seq_len"] for row in store.rows()] == ["9", "128", "512", "1024", "65536"]


def test_rows_that_a_merge_left_out_of_order_are_sorted_by_the_next_put(store, make_row):
    for seq_len in (128, 256, 512):
        store.put(make_row(seq_len=seq_len))
    good = store.path.read_text()
    header, *lines = good.splitlines()
    store.path.write_text("\n".join([header, *reversed(lines), ""]))
    assert [row["seq_len"] for row in store.rows()] == ["512", "256", "128"]
    store.put(make_row(seq_len=256))
    assert store.path.read_text() == good


def test_returned_rows_are_copies(store, make_row):
    store.put(make_row())
    store.rows()[0]["ms"] = "0"
    store.get(KEY)["ms"] = "0"
    assert store.get(KEY)["ms"] == "1.5"


def test_a_hand_edit_between_two_reads_is_seen(store, make_row):
    store.put(make_row())
    store.path.write_text(store.path.read_text().replace(",1.5,", ",1.6,"))
    assert store.get(KEY)["ms"] == "1.6"
    store.put(make_row(seq_len=256))
    assert store.get(KEY)["ms"] == "1.6"
    store.path.unlink()
    assert store.rows() == []


def test_a_note_keeps_commas_and_quotes_and_loses_line_breaks(store, make_row):
    note = 'CUDA out of memory, "tried"\n\tto\r\nallocate\x00\u2028 x \ud800'
    store.put(make_row(status="oom", ms=None, ms_p20=None, ms_p80=None, n=None, note=note))
    fresh = Store(FLASH, "cpu", store.data)
    assert fresh.rows()[0]["note"] == 'CUDA out of memory, "tried" to allocate x'
    assert list(csv.DictReader(io.StringIO(store.path.read_text()))) == fresh.rows()


def test_a_note_holds_no_local_path(store, make_row, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    store.put(make_row(note="see /home/somebody/log.txt and /scratch/me/core"))
    assert store.rows()[0]["note"] == "see ~/log.txt and .../core"


def test_numpy_scalars_are_numbers(store, make_row):
    given = {"batch": np.int64(1), "ms": np.float32(1.5), "causal": np.bool_(True)}
    store.put(make_row(**given))
    assert store.get({**KEY, "causal": np.True_})["ms"] == "1.5"


def test_the_mode_of_the_file_is_that_of_any_new_file_and_stays(store, make_row, tmp_path):
    (tmp_path / "plain").touch()
    store.put(make_row())
    assert store.path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    store.path.chmod(0o664)
    store.put(make_row(seq_len=256))
    assert store.path.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"latency": 1}, "unknown column latency; allowed are implementation, dtype, batch"),
        ({"status": "fine"}, "status is 'fine'; allowed are ok, oom, unsupported, error"),
        ({"status": None}, "status is ''; allowed are ok"),
        ({"ms": None}, "status is ok but ms is ''"),
        ({"ms": math.nan}, "ms is nan, not a finite number"),
        ({"ms": math.inf}, "ms is inf, not a finite number"),
        ({"ms": "nan"}, "status is ok but ms is 'nan'"),
        ({"ms": "1_0"}, "status is ok but ms is '1_0'"),
        ({"ms": 0.0}, "status is ok but ms is '0.0', not a positive number"),
        ({"ms": -1.5}, "status is ok but ms is '-1.5', not a positive number"),
        ({"ms_p20": math.nan}, "ms_p20 is nan"),
        ({"ms_p20": 1.6}, "ms 1.5 is not between ms_p20 1.6 and ms_p80 1.75"),
        ({"n": 0}, "n is 0"),
        ({"n": 2.5}, "n is '2.5', not a whole number"),
        ({"status": "oom"}, "ms is given, but status is oom"),
        (
            {"status": "oom", "ms": None, "ms_p20": None, "ms_p80": None, "n": None, "ms_host": 1},
            "ms_host is given, but status is oom",
        ),
        ({"ms_graph": 0.0}, "status is ok but ms_graph is '0.0', not a positive number"),
        ({"ms_host": "soon"}, "ms_host is 'soon', not a number"),
        ({"sm_mhz": 1.5}, "sm_mhz is '1.5', not a whole number"),
        ({"batch": None}, "batch is '', not a whole number"),
        ({"batch": "1.0"}, "batch is '1.0', not a whole number"),
        ({"batch": -1}, "batch is '-1', not a whole number"),
        ({"batch": True}, "batch is 'true', not a whole number"),
        ({"seq_len": 2**63}, "seq_len is 9223372036854775808, more than the largest, 92233"),
        ({"peak_bytes": 10**400}, "peak_bytes is 1000000"),
        ({"batch": "01"}, "batch is '01', not a whole number"),
        ({"causal": "yes"}, "causal is 'yes'; allowed are true, false"),
        ({"peak_bytes": "many"}, "peak_bytes is 'many', not a whole number"),
        ({"note": ["a"]}, "note is a list; allowed are text, numbers, booleans and None"),
        ({"run": ""}, "run is blank"),
        ({"run": "nobody"}, "run 'nobody' is not in runs.csv"),
    ],
)
def test_a_row_that_is_not_valid_is_refused_and_kept_in_the_message(
    store, make_row, columns, message
):
    store.put(make_row(seq_len=256))
    before = store.path.read_bytes()
    with pytest.raises(StoreError) as raised:
        store.put(make_row(implementation="flex", **columns))
    text = str(raised.value)
    assert text.startswith(f"{store.path}: ") and message in text and "\n" not in text
    assert "the row not stored: " in text and "flex" in text.partition("not stored")[2]
    assert store.path.read_bytes() == before


@pytest.mark.parametrize("missing", ["seq_len", "pass", "status", "run"])
def test_a_row_without_a_required_column_is_refused(store, make_row, missing):
    row = make_row()
    del row[missing]
    with pytest.raises(StoreError, match=f"column {missing} is missing; the columns are impl"):
        store.put(row)
    assert not store.path.exists()


def test_get_refuses_unknown_and_missing_columns(store):
    with pytest.raises(StoreError, match="unknown column seqlen; allowed are implementation"):
        store.get({**KEY, "seqlen": 128})
    with pytest.raises(StoreError, match="column head_dim is missing"):
        store.get({name: value for name, value in KEY.items() if name != "head_dim"})


def test_unknown_sections_and_impossible_devices_are_refused(data):
    with pytest.raises(
        StoreError,
        match=f"section 'flsh': allowed are {', '.join(SECTIONS)}",
    ):
        Store("flsh", "cpu", data)
    with pytest.raises(StoreError, match="section 'flsh'"):
        read_section("flsh", data)
    for device in ("", "NVIDIA H200", "../cpu", "cpu\n", "a--b"):
        with pytest.raises(StoreError, match="must be lower-case"):
            Store(FLASH, device, data)


def test_a_ceiling_without_a_dtype_is_a_row(data, make_row):
    store = Store("ceiling", "nvidia-h200", data)
    key = {"operation": "copy", "dtype": None, "size": 2**30}
    store.put({**key, "status": "ok", "ms": 0.5, "run": make_row()["run"]})
    assert store.get(key)["dtype"] == ""
    assert store.section is CEILING


def test_read_section_gives_every_device(data, make_row):
    assert read_section("flash", data) == {}
    for device in ("nvidia-h200", "cpu"):
        Store(FLASH, device, data).put(make_row())
    (data / "measured" / "flash" / ".cpu.csv.1.tmp").write_text("torn")
    (data / "measured" / "flash" / ".old.csv").write_text("torn")
    measured = read_section("flash", data)
    assert list(measured) == ["cpu", "nvidia-h200"]
    assert measured["cpu"] == Store(FLASH, "cpu", data).rows()


def test_a_figure_without_its_run_is_not_read_for_publication(data, store, make_row):
    for seq_len in (128, 256):
        store.put(make_row(seq_len=seq_len))
    text = store.path.read_text().splitlines()
    text[2] = text[2].replace("-000000", "-999999")
    store.path.write_text("\n".join(text) + "\n")
    with pytest.raises(StoreError, match=r"cpu\.csv:3: run '.*-999999' is not in runs\.csv"):
        read_section("flash", data)


def test_the_data_folder_follows_the_environment(data, make_row, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(data))
    Store(FLASH, "cpu").put(make_row())
    assert list(read_section("flash")) == ["cpu"]


def test_check_writable_leaves_only_folders(store):
    store.check_writable()
    assert list(store.path.parent.iterdir()) == []


def test_a_linked_file_is_written_and_stays_linked(data, store, make_row, tmp_path):
    target = tmp_path / "shared" / "mine.csv"
    store.path.parent.mkdir(parents=True)
    store.path.symlink_to(target)
    for seq_len in (128, 256):
        store.put(make_row(seq_len=seq_len))
    assert store.path.is_symlink() and len(store.rows()) == 2
    assert [path.name for path in target.parent.iterdir()] == ["mine.csv"]
    assert len(target.read_text().splitlines()) == 3


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_sections_end_in_the_common_columns_and_name_each_once(section):
    assert section.columns[-6:] == ("status", "ms", "ms_p20", "ms_p80", "n", "run")
    assert len(set(section.columns)) == len(section.columns)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_time_is_stored_to_six_digits_and_is_then_stable(ms):
    text = format_value("ms", ms)
    assert math.isclose(float(text), ms, rel_tol=1e-5)
    assert format_value("ms", float(text)) == text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
@example(9007199254740993)  # that no float is
@example(-0.0)
@example(5e-324)
def test_other_numbers_are_stored_exactly(number):
    assert type(number)(format_value("share", number)) == number


_puts = st.lists(
    st.tuples(
        st.sampled_from(["a2lib", "eager", "flex, compiled"]),
        st.sampled_from([2, 16, 128, 1024, 65536]),
        st.booleans(),
        st.floats(min_value=0.001, max_value=1e5),
        st.text(max_size=20),
    ),
    max_size=12,
)


def _reset(store) -> None:
    store.path.unlink(missing_ok=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(puts=_puts)
def test_any_sequence_of_puts_is_a_dictionary(store, make_row, puts):
    _reset(store)
    model = {}
    for implementation, seq_len, causal, ms, note in puts:
        store.put(
            make_row(
                implementation=implementation, seq_len=seq_len, causal=causal, note=note,
                ms=ms, ms_p20=None, ms_p80=None,
            )
        )  # fmt: skip
        model[implementation, str(seq_len), "true" if causal else "false"] = format_value("ms", ms)
    for reader in (store, Store(FLASH, "cpu", store.data)):
        rows = reader.rows()
        found = {(r["implementation"], r["seq_len"], r["causal"]): r["ms"] for r in rows}
        assert found == model and len(rows) == len(model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(puts=_puts, random=st.randoms(use_true_random=False))
def test_the_file_does_not_depend_on_the_order_of_insertion(store, make_row, puts, random):
    last = {put[:3]: put for put in puts}
    contents = []
    for _ in range(2):
        _reset(store)
        shuffled = list(last.values())
        random.shuffle(shuffled)
        for implementation, seq_len, causal, _, note in shuffled:
            names = {"implementation": implementation, "seq_len": seq_len, "causal": causal}
            store.put(make_row(**names, note=note))
        contents.append(store.path.read_bytes() if store.path.exists() else b"")
    assert contents[0] == contents[1]
