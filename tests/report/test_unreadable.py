"""A row that the report cannot read is named: file, line, column."""

import pytest

from a2lib.measure import FLASH, StoreError
from a2lib.measure.table import to_csv
from a2lib.report.data import ReportError, load, load_reference


@pytest.mark.parametrize("value", [2**63, 10**30, 10**400])
def test_a_measured_row_that_no_table_holds(tmp_path, value):
    row = dict.fromkeys(FLASH.columns, "") | {
        "implementation": "eager", "dtype": "fp32", "batch": "1", "heads": "1",
        "seq_len": str(value), "head_dim": "64", "causal": "true", "pass": "forward",
        "status": "oom", "run": "a",
    }  # fmt: skip
    path = tmp_path / "measured" / "flash" / "cpu.csv"
    path.parent.mkdir(parents=True)
    path.write_text(to_csv([FLASH.columns, row.values()]))
    with pytest.raises(StoreError, match=r"cpu\.csv:2: seq_len is '\d+', not a whole number"):
        load("flash", [tmp_path])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("seq_len,device,source\n16,a,b\nmany,a,b\n", r"x\.csv: seq_len: .*many"),
        ("seq_len,device,source\n2.5,a,b\n", r"x\.csv: seq_len: "),
        ("ms,device,source\n1.5,a,b\n1.5,a,b,c\n", r"x\.csv: "),
        ("ms,device,source\n1.5,a,\n", r"x\.csv:2: .*source"),
        ("ms,source\n1.5,a\n", r"x\.csv: 'device'"),
        ("", r"x\.csv: "),
    ],
)
def test_a_published_table_that_cannot_be_shown(tmp_path, content, complaint):
    path = tmp_path / "reference" / "x.csv"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ReportError, match=complaint):
        load_reference("x", tmp_path)
