"""The result store in one process: what it keeps, and what it refuses."""

import csv
import functools
import io
import math
import os
import re

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from tables import values

from a2lib.lab import SECTIONS, StoreError, Table, read_section
from a2lib.lab.store import format_value

refuses = functools.partial(refused, error=StoreError)
NOT_MEASURED = dict.fromkeys(("ms", "ms_p20", "ms_p80", "n"))


@pytest.fixture
def filled(store, make_row) -> Table:
    for seq_len in (128, 256, 512):
        store.put(make_row(seq_len=seq_len))
    return store


def test_a_row_comes_back_as_text_and_stands_in_the_file_as_such(store, make_row):
    assert store.rows() == [] and not store.path.exists()
    store.put(make_row(peak_bytes=4096))
    given = make_row(peak_bytes="4096", causal="true")
    expected = {column: str(given.get(column, "")) for column in SECTIONS["flash"].columns}
    assert store.rows() == [expected]
    assert store.path.read_text() == f"{','.join(expected)}\n{','.join(expected.values())}\n"
    assert store.path == store.data / "measured" / "flash" / "cpu.csv"
    assert sorted(os.listdir(store.path.parent)) == [".lock", "cpu.csv"]


def test_a_notebook_shows_what_was_asked_for_else_what_is_stored_else_what_is_published(
    store, make_row, capsys
):
    published = store.shown()
    assert len(published) > 1000 and "published rows of nvidia-h200" in capsys.readouterr().out
    short, long = make_row(seq_len=128), make_row(seq_len=256)
    store.put(short, long)
    assert list(store.frame([long, short])["seq_len"]) == [256, 128]
    assert list(store.shown([long])["seq_len"]) == [256] and not capsys.readouterr().out
    assert list(store.shown([make_row(seq_len=512)])["seq_len"]) == [128, 256]
    assert "all stored rows" in capsys.readouterr().out


def test_a_note_is_one_line_without_local_paths(store, make_row, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    note = (
        'out of memory, "tried"\n\tto\r\nread\x00\u2028 /home/somebody/log and /scratch/core \ud800'
    )
    store.put(make_row(status="oom", **NOT_MEASURED, note=note))
    (row,) = Table("flash", "cpu", store.data).rows()
    assert row["note"] == 'out of memory, "tried" to read ~/log and .../core'
    assert list(csv.DictReader(io.StringIO(store.path.read_text()))) == [row]


NOT_VALID = [
    ({"latency": 1}, "unknown column latency; the columns are implementation, dtype, batch"),
    ({"seq_len": None, "status": "fine"}, "status is 'fine'; allowed are ok, oom, unsupported"),
    ({"ms": None}, "status is ok, but ms is blank"),
    ({"ms": math.nan}, "ms is nan; allowed are text, finite numbers, true, false"),
    ({"status": "oom"}, "ms is given, but status is oom"),
    ({"sm_mhz": 1.5}, "sm_mhz is '1.5', not a whole number"),
]


@pytest.mark.parametrize(("columns", "message"), NOT_VALID)
def test_a_row_that_is_not_valid_is_refused_and_kept_in_the_message(
    filled, make_row, columns, message
):
    before = filled.path.read_bytes()
    text = str(refuses(re.escape(message), filled.put, make_row(implementation="flex", **columns)))
    assert text.startswith(f"{filled.path}: ")
    assert "the row not stored: {'implementation': 'flex', 'dtype': 'bf16'," in text
    assert filled.path.read_bytes() == before


def test_what_must_be_named(store, make_row):
    row = make_row()
    del row["seq_len"]
    refuses("column seq_len is missing; the columns are impl", store.put, row)
    unknown = "table flsh .did you mean flash..; allowed are flash, "
    refuses(unknown, Table, "flsh", "cpu", store.data)
    refuses(unknown, read_section, "flsh")


def test_read_section_gives_every_device(data, make_row, monkeypatch):
    assert read_section("flash", data) == {}
    monkeypatch.setenv("A2LIB_DATA", str(data))
    for device in ("nvidia-h200", "cpu"):
        Table("flash", device).put(make_row())
    (data / "measured" / "flash" / ".cpu.csv.tmp").write_text("torn")
    (data / "measured" / "flash" / ".old.csv").write_text("torn")
    measured = read_section("flash")
    assert list(measured) == ["cpu", "nvidia-h200"]
    assert measured["cpu"] == Table("flash", "cpu", data).rows()


def test_a_figure_without_its_run_is_not_read_for_publication(filled):
    text = filled.path.read_text().splitlines()
    text[2] = text[2].replace("-000000", "-999999")
    filled.path.write_text("\n".join(text) + "\n")
    words = r"cpu\.csv:3: run '.*-999999' is not in runs\.csv"
    refuses(words, read_section, "flash", filled.data)


# What becomes what on which line of a file.
BROKEN = [
    (3, "a2lib,", "", "18 fields, not 19"),
    (2, "a2lib,", "<<<<<<< HEAD\na2lib,", "1 fields, not 19"),
    (1, "batch,heads", "heads,batch", "the header is"),
    (3, ",1.5,", ",fast,", "ms is 'fast'"),
    (4, ",512,", ",128,", "the same key as a line before"),
    (4, "a2lib", '"a2lib', "unexpected end of data"),
    (4, "00000\n", "", "cut short"),  # in the name of the run
    (3, "a2lib", "a2\0lib", "unprintable characters"),
    (3, "a2lib", "a2\udcfflib", "unprintable characters, or not UTF-8"),
]


@pytest.mark.parametrize(("line", "old", "new", "reason"), BROKEN)
def test_a_file_broken_by_hand_is_named_and_left_alone(filled, make_row, line, old, new, reason):
    good = filled.path.read_bytes()
    lines = good.decode().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    content = "".join(lines).encode(errors="surrogateescape")
    filled.path.write_bytes(content)
    calls = [
        Table.rows,
        lambda store: read_section("flash", store.data),
        lambda store: store.put(make_row(seq_len=4096)),
    ]
    # A store that had read the file before it was broken must see it just as a new one does.
    for store in (filled, Table("flash", "cpu", filled.data)):
        for call in calls:
            assert str(refuses("", call, store)).startswith(f"{store.path}:{line}: {reason}")
            assert store.path.read_bytes() == content
    filled.path.write_bytes(good)
    filled.put(make_row(seq_len=2048))
    assert len(filled.rows()) == 4


def test_a_file_without_newer_columns_is_read_with_blanks(store, data, make_row):
    newer = ("ms_graph", "ms_host", "sm_mhz")
    store.put(make_row(seq_len=128, note='a "note"', peak_bytes=128), make_row(seq_len=256))
    before = store.rows()
    assert values(before, "seq_len", "ms", "ms_graph") == [("128", "1.5", ""), ("256", "1.5", "")]
    older = pd.read_csv(store.path, dtype=str).drop(columns=list(newer))
    older.to_csv(store.path, index=False, lineterminator="\n")
    assert store.rows() == before
    # The next row writes the new header and keeps the others.
    store.put(make_row(seq_len=512, ms_graph=0.25, sm_mhz=1980))
    for each in (store, Table("flash", "cpu", data)):
        assert each.rows()[:2] == before and each.rows()[2]["ms_graph"] == "0.25"
    assert store.path.read_text().startswith(",".join(SECTIONS["flash"].columns) + "\n")


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_time_is_stored_to_six_digits_and_is_then_stable(ms):
    text = format_value("ms", ms)
    assert math.isclose(float(text), ms, rel_tol=1e-5)
    assert format_value("ms", float(text)) == text


def test_several_rows_are_put_together_each_in_its_place_or_none_of_them(store, make_row):
    store.put()
    assert not store.path.exists()
    several = []
    for n in (512, 128, 256):
        several.append(make_row(seq_len=n, ms=n / 100, ms_p20=None, ms_p80=None))
        store.put(several[-1])
    one_by_one = store.path.read_bytes()
    store.path.unlink()
    store.put(*several)
    assert store.path.read_bytes() == one_by_one
    two = make_row(seq_len=64), make_row(seq_len=32, ms=-1.0)
    refuses("ms is '-1.0'.* the row not stored: .*'seq_len': 32,", store.put, *two)
    assert store.path.read_bytes() == one_by_one and len(store.rows()) == 3
    store.put(several[0], {**several[0], "note": "again"})
    assert values(store.rows(), "note") == ["again", "", ""]


_put = st.tuples(
    st.sampled_from(["a2lib", "eager", "flex, compiled"]),
    st.sampled_from([2, 16, 1024]),
    st.booleans(),
    st.floats(min_value=0.001, max_value=1e5),
    st.text(max_size=20),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=4)
@given(puts=st.lists(_put, max_size=8))
def test_any_sequence_of_puts_is_a_dictionary(store, make_row, puts):
    store.path.unlink(missing_ok=True)
    expected = {}
    for implementation, seq_len, causal, ms, note in puts:
        key = {"implementation": implementation, "seq_len": seq_len, "causal": causal}
        store.put(make_row(**key, note=note, ms=ms, ms_p20=None, ms_p80=None))
        stored = implementation, str(seq_len), str(causal).lower(), format_value("ms", ms)
        expected[implementation, seq_len, causal] = stored
    for reader in (store, Table("flash", "cpu", store.data)):
        found = values(reader.rows(), "implementation", "seq_len", "causal", "ms")
        assert found == list(expected.values())
