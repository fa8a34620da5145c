"""A row that the report cannot read is named: file, line, column."""

import pytest

from a2lib.measure import FLASH, StoreError
from a2lib.measure.table import to_line
from a2lib.report.data import ReportError, load, load_devices, load_reference


@pytest.mark.parametrize("value", [2**63, 10**30, 10**400])
def test_a_measured_row_that_no_table_holds(tmp_path, value):
    row = dict.fromkeys(FLASH.columns, "") | {
        "implementation": "eager", "dtype": "fp32", "batch": "1", "heads": "1",
        "seq_len": str(value), "head_dim": "64", "causal": "true", "pass": "forward",
        "status": "oom", "run": "a",
    }  # fmt: skip
    path = tmp_path / "measured" / "flash" / "cpu.csv"
    path.parent.mkdir(parents=True)
    path.write_text(f"{to_line(FLASH.columns)}\n{to_line(row.values())}\n")
    with pytest.raises(StoreError, match=r"cpu\.csv:2: seq_len is \d+, more than the largest"):
        load("flash", [tmp_path])


@pytest.mark.parametrize("value", ["many", "1" * 30, "2.5"])
def test_a_published_row_with_no_number(tmp_path, value):
    path = tmp_path / "reference" / "x.csv"
    path.parent.mkdir()
    path.write_text(f"seq_len,ms,device,source\n16,1.5,a,b\n{value},2.5,a,b\n")
    with pytest.raises(ReportError, match=rf"x\.csv:3: seq_len is '{value}', not its kind"):
        load_reference("x", tmp_path)


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("x", b"ms,device,source\n1.5,a,b,c\n", r"x\.csv:2: 4 fields, not 3"),
        ("x", b"ms,device,source\n1.5,a,b\n1.5,a\n", r"x\.csv:3: 2 fields, not 3"),
        ("x", b"ms,device,source\n1.5,a,\xff\n", r"x\.csv: not a table of UTF-8 text"),
        ("x", b"", r"x\.csv: not a table"),
    ],
)
def test_a_published_table_of_another_form(tmp_path, name, content, complaint):
    path = tmp_path / "reference" / f"{name}.csv"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ReportError, match=complaint):
        load_reference(name, tmp_path)


def test_a_published_table_that_lacks_what_is_asked_of_it(tmp_path):
    path = tmp_path / "reference" / "devices.csv"
    path.parent.mkdir()
    path.write_text("device,source,value\na,b,1\n")
    with pytest.raises(ReportError, match=r"devices\.csv:1: column quantity, unit, address is"):
        load_devices(tmp_path)
    with pytest.raises(ReportError, match=r"devices\.csv:1: column ms is missing"):
        load_reference("devices", tmp_path, needs=("value", "ms"))
    assert len(load_reference("devices", tmp_path)) == 1
