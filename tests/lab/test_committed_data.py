"""The registry, and everything that has to agree with it; the measured data in the repository: each
file reads, has its runs, and is written back byte for byte."""

import re
import shutil

import pytest

from a2lib import paths
from a2lib.lab import SECTIONS, Table, bulk, read_runs, read_section
from a2lib.lab.runs import runs_table
from a2lib.lab.sections import COMMON, FLAGS, INTEGERS, RESULTS

DATA = paths.ROOT / "data"
MEASURED = DATA / "measured"
TABLES = [p for p in sorted(MEASURED.glob("*/*.csv")) if p.parent.name != "bulk"]
PICTURES = {}  # of each bulk table
for path in sorted(MEASURED.glob("bulk/*/*/*.csv")):
    PICTURES.setdefault(path.parent.parent.name, []).append(path)


@pytest.fixture
def data(tmp_path):
    """Return a data folder that has this one's runs."""
    (tmp_path / "measured").mkdir()
    shutil.copy(MEASURED / "runs.csv", tmp_path / "measured")
    return tmp_path


def test_measured_holds_sections_and_runs_alone():
    assert {path.name for path in MEASURED.glob("[!.]*")} <= {*SECTIONS, "runs.csv", "bulk"}
    assert TABLES and PICTURES


def test_the_runs(tmp_path):
    runs_table(tmp_path).put(*read_runs(DATA))
    assert (tmp_path / "measured/runs.csv").read_bytes() == (MEASURED / "runs.csv").read_bytes()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_table(path, data):
    section, device = path.parent.name, path.stem
    Table(section, device, data).put(*read_section(section, DATA)[device])
    assert (data / path.relative_to(DATA)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("table", PICTURES)
def test_the_pictures_of_a_table(table, data):
    for path in PICTURES[table]:
        device, name = path.parent.name, path.stem
        found = bulk.read(table, device, name, DATA)
        bulk.put(table, device, name, found.rows, run=found.run, about=found.about, data=data)
        assert (data / path.relative_to(DATA)).read_bytes() == path.read_bytes(), name


# A table of data/README.md: its section, and its rows as (column, " (key)" or "", meaning).
README = {
    name: re.findall(r"^\| `(\w+)`( \(key\))? \| (.+) \|$", table, re.M)
    for name, table in re.findall(
        r"<!-- columns of (\w+) -->\n\n(.*?)\n\n",
        (DATA / "README.md").read_text(encoding="utf-8"),
        re.S,
    )
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_a_section(section):
    """Its columns end in the common ones and a reason, and stand in the readme of the data."""
    assert section.columns[-7:] == ("note", *COMMON)
    assert len(set(section.columns)) == len(section.columns)
    expected = [(c, " (key)") for c in section.key] + [(c, "") for c in section.values]
    assert [(column, key) for column, key, _ in README[section.name]] == expected


def test_a_column_means_the_same_and_is_of_one_kind_everywhere():
    meanings = {(column, meaning) for rows in README.values() for column, _, meaning in rows}
    used = {column for column, _ in meanings}
    assert len(meanings) == len(used) and set(README) == set(SECTIONS)
    kinds = INTEGERS, RESULTS, FLAGS
    assert set().union(*kinds) <= used | set(COMMON)
    assert sum(map(len, kinds)) == len(set().union(*kinds))


def test_make_runs_the_notebooks_of_the_registry():
    """Its wildcard is over notebooks/."""
    found = {s.notebook for s in SECTIONS.values() if s.notebook}
    assert found == {p.stem for p in (paths.ROOT / "notebooks").glob("*.ipynb")}
