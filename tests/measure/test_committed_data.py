"""The measured data in the repository: every file is a valid table, and every row has its run."""

import shutil

import pytest

from a2lib import paths
from a2lib.measure import SECTIONS, Store, read_runs, read_section

DATA = paths.ROOT / "data"
FILES = sorted((DATA / "measured").glob("*/*.csv"))


def test_measured_holds_sections_and_runs_alone():
    found = {path.name for path in (DATA / "measured").glob("[!.]*")}
    assert found <= {*SECTIONS, "runs.csv", "bulk"}
    assert read_runs(DATA) or not FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_file_is_as_the_store_writes_it(path, tmp_path):
    section, device = path.parent.name, path.stem
    rows = read_section(section, DATA)[device]
    (tmp_path / "measured" / section).mkdir(parents=True)
    shutil.copy(DATA / "measured" / "runs.csv", tmp_path / "measured")
    shutil.copy(path, tmp_path / "measured" / section)
    copy = Store(section, device, tmp_path)
    copy.put(rows[0])
    assert copy.path.read_bytes() == path.read_bytes()
