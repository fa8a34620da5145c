"""A file that was broken by hand: one line with file and line number, and nothing is touched."""

import pytest

from a2lib.measure import FLASH, Store, StoreError, read_runs, read_section


def _break(text: str, line: int, old: str, new: str) -> str:
    lines = text.split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "\n".join(lines)


def _insert(text: str, line: int, new: str) -> str:
    lines = text.split("\n")
    lines.insert(line - 1, new)
    return "\n".join(lines)


BROKEN = {
    "a field too few": (lambda t: _break(t, 3, "a2lib,", ""), 3, "18 fields, not 19"),
    "a field too many": (lambda t: _break(t, 4, "a2lib,", "a2lib,,"), 4, "20 fields, not 19"),
    "no header": (lambda t: t.partition("\n")[2], 1, "the header is 'a2lib,"),
    "another header": (lambda t: _break(t, 1, "seq_len", "length"), 1, "the header is"),
    "columns swapped": (lambda t: _break(t, 1, "batch,heads", "heads,batch"), 1, "the header is"),
    "ms not a number": (lambda t: _break(t, 3, ",1.5,", ",fast,"), 3, "ms is 'fast'"),
    "ms missing": (lambda t: _break(t, 3, ",1.5,", ",,"), 3, "ms is ''"),
    "ms not finite": (lambda t: _break(t, 3, ",1.5,", ",1e999,"), 3, "ms is '1e999'"),
    "ms in other digits": (lambda t: _break(t, 3, ",1.5,", ",\uff11.\uff15,"), 3, "ms is '\uff11"),
    "no implementation": (lambda t: _break(t, 3, "a2lib,", ","), 3, "implementation is blank"),
    "seq_len not a number": (lambda t: _break(t, 3, ",256,", ",2k,"), 3, "seq_len is '2k'"),
    "seq_len spelt anew": (lambda t: _break(t, 3, ",256,", ",0256,"), 3, "seq_len is '0256'"),
    "causal spelt anew": (lambda t: _break(t, 2, ",true,", ",True,"), 2, "causal is 'True'"),
    "bad status": (lambda t: _break(t, 2, ",ok,", ",okay,"), 2, "status is 'okay'"),
    "no run": (lambda t: _break(t, 2, "20260102T030405Z-cpu-000000", ""), 2, "run is blank"),
    "the same key": (lambda t: _break(t, 4, ",512,", ",128,"), 4, "the same key as line 2"),
    "cut short": (lambda t: t[:-9], 5, "cut short"),
    "no last line end": (lambda t: t[:-1], 5, "cut short"),
    "empty line": (lambda t: _insert(t, 3, ""), 3, "0 fields, not 19"),
    "empty file": (lambda t: "", 1, "the file is empty"),
    "conflict begins": (lambda t: _insert(t, 3, "<<<<<<< HEAD"), 3, "a merge conflict marker"),
    "conflict in header": (lambda t: _insert(t, 1, "<<<<<<< HEAD"), 1, "a merge conflict marker"),
    "conflict middle": (lambda t: _insert(t, 4, "======="), 4, "a merge conflict marker"),
    "quote not closed": (lambda t: _break(t, 3, "a2lib", '"a2lib'), 3, "unexpected end of data"),
    "quote in the way": (lambda t: _break(t, 3, "a2lib", '"a2"lib'), 3, "expected after"),
    "NUL": (lambda t: _break(t, 3, "a2lib", "a2\0lib"), 3, "unprintable characters"),
    "carriage return": (lambda t: _break(t, 3, "a2lib", "a2\rlib"), 3, ""),
    "byte order mark": (lambda t: "\ufeff" + t, 1, "a byte order mark"),
}


@pytest.fixture
def filled(store, make_row) -> Store:
    for seq_len in (128, 256, 512, 1024):
        store.put(make_row(seq_len=seq_len))
    return store


def _check_refused(store: Store, row: dict, content: bytes, line: int, reason: str) -> None:
    calls = {
        "rows": lambda s: s.rows(),
        "get": lambda s: s.get({name: row[name] for name in FLASH.key}),
        "put": lambda s: s.put(row),
        "check_writable": lambda s: s.check_writable(),
        "read_section": lambda s: read_section("flash", s.data),
    }
    # A store that had read the file before it was broken must see it just as a new one does.
    for each in (store, Store(FLASH, "cpu", store.data)):
        for name, call in calls.items():
            with pytest.raises(StoreError) as raised:
                call(each)
            text = str(raised.value)
            assert text.startswith(f"{store.path}:{line}: "), name
            assert reason in text and "mend that line" in text and "\n" not in text
            if name == "put":
                assert (
                    "the row not stored: a2lib,bf16,1,16,4096,64,true,forward,,,,,,ok,2.125,"
                    in text
                )
            assert store.path.read_bytes() == content
            assert [path.name for path in store.path.parent.iterdir()] == ["cpu.csv"]


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_file_is_named_and_left_alone(filled, make_row, case):
    breaking, line, reason = BROKEN[case]
    content = breaking(filled.path.read_text()).encode()
    filled.path.write_bytes(content)
    row = make_row(seq_len=4096, ms=2.125, ms_p20=None, ms_p80=None)
    _check_refused(filled, row, content, line, reason)


def test_bytes_that_are_not_text(filled, make_row):
    content = filled.path.read_bytes().replace(b"a2lib,bf16,1,16,512", b"a2lib,bf\xff6,1,16,512")
    filled.path.write_bytes(content)
    row = make_row(seq_len=4096, ms=2.125, ms_p20=None, ms_p80=None)
    _check_refused(filled, row, content, 4, "not UTF-8 text")


def test_once_mended_the_store_goes_on(filled, make_row):
    good = filled.path.read_bytes()
    filled.path.write_bytes(good[:-3])
    with pytest.raises(StoreError):
        filled.put(make_row(seq_len=2048))
    filled.path.write_bytes(good)
    filled.put(make_row(seq_len=2048))
    assert [row["seq_len"] for row in filled.rows()] == ["128", "256", "512", "1024", "2048"]


def test_line_ends_of_another_system_are_read_and_made_alike(filled, make_row):
    filled.path.write_bytes(filled.path.read_bytes().replace(b"\n", b"\r\n"))
    filled.put(make_row(seq_len=2048))
    assert b"\r" not in filled.path.read_bytes()
    assert len(filled.rows()) == 5


def test_a_broken_table_of_runs_is_named_and_the_row_kept(filled, make_row):
    runs = filled.data / "measured" / "runs.csv"
    runs.write_text(runs.read_text().replace("{}", "{"))
    with pytest.raises(StoreError, match=r"runs\.csv:2: parameters are not JSON") as raised:
        filled.put(make_row(seq_len=4096, ms=2.125, ms_p20=None, ms_p80=None))
    assert "the row not stored: a2lib,bf16,1,16,4096,64,true,forward,,,,,,ok,2.125," in str(
        raised.value
    )
    for call in (filled.check_writable, lambda: read_runs(filled.data)):
        with pytest.raises(StoreError, match=r"runs\.csv:2: "):
            call()
