"""The measured data in the repository: each file reads, has its runs, and is written back byte for
byte."""

import shutil

import pytest

from a2lib import paths
from a2lib.measure import SECTIONS, Store, bulk, read_runs, read_section
from a2lib.measure.runs import runs_table

DATA = paths.ROOT / "data"
MEASURED = DATA / "measured"
TABLES = [p for p in sorted(MEASURED.glob("*/*.csv")) if p.parent.name != "bulk"]
PICTURES = sorted(MEASURED.glob("bulk/*/*/*.csv"))


@pytest.fixture
def copy(tmp_path):
    """A data folder with the runs and, given a file of this one, a copy of it."""

    def make(path):
        there = tmp_path / path.relative_to(DATA)
        there.parent.mkdir(parents=True)
        shutil.copy(path, there)
        shutil.copy(MEASURED / "runs.csv", tmp_path / "measured")
        return there

    return make


def test_measured_holds_sections_and_runs_alone():
    assert {path.name for path in MEASURED.glob("[!.]*")} <= {*SECTIONS, "runs.csv", "bulk"}
    assert TABLES and PICTURES


def test_the_runs(tmp_path):
    for run in reversed(read_runs(DATA)):
        runs_table(tmp_path).put(run)
    assert (tmp_path / "measured/runs.csv").read_bytes() == (MEASURED / "runs.csv").read_bytes()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_table(path, copy, tmp_path):
    section, device = path.parent.name, path.stem
    there = copy(path)
    Store(section, device, tmp_path).put(read_section(section, DATA)[device][0])
    assert there.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: "-".join(path.parts[-3:]))
def test_a_picture(path, copy, tmp_path):
    there = copy(path)
    table, device, name = path.parent.parent.name, path.parent.name, path.stem
    found = bulk.read(table, device, name, DATA)
    bulk.put(table, device, name, found.rows, run=found.run, about=found.about, data=tmp_path)
    assert there.read_bytes() == path.read_bytes()
