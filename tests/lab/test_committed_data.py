"""The registry, and everything that has to agree with it; the measured data in the repository: each
file reads, has its runs, and is written back byte for byte."""

import re
import shutil
from operator import attrgetter

import pandas as pd
import pytest

from a2lib import paths
from a2lib.lab import SECTIONS, Table, bulk, read_runs, read_section
from a2lib.lab.runs import runs_table
from a2lib.lab.sections import COMMON, FLAGS, INTEGERS, RESULTS

DATA = paths.ROOT / "data"
MEASURED = DATA / "measured"
TABLES = sorted(MEASURED.glob("*/*.csv"))
PICTURES = sorted(MEASURED.glob("bulk/*/*/*.csv"))


@pytest.fixture
def data(tmp_path):
    """Return a data folder that has this one's runs."""
    (tmp_path / "measured").mkdir()
    shutil.copy(MEASURED / "runs.csv", tmp_path / "measured")
    return tmp_path


def test_measured_holds_sections_and_runs_alone():
    for path in MEASURED.glob("[!.]*"):
        assert path.name in (*SECTIONS, "runs.csv", "bulk")
    assert TABLES and PICTURES


def test_the_runs(tmp_path):
    runs_table(tmp_path).put(*read_runs(DATA))
    assert (tmp_path / "measured/runs.csv").read_bytes() == (MEASURED / "runs.csv").read_bytes()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_table(path, data):
    section, device = path.parent.name, path.stem
    Table(section, device, data).put(*read_section(section, DATA)[device])
    assert (data / path.relative_to(DATA)).read_bytes() == path.read_bytes()


def test_the_pictures(data):
    for path in PICTURES:
        table, device, name = path.parts[-3], path.parts[-2], path.stem
        found = bulk.read(table, device, name, DATA)
        bulk.put(table, device, name, found.rows, run=found.run, about=found.about, data=data)
        assert (data / path.relative_to(DATA)).read_bytes() == path.read_bytes(), path


def columns_of_the_readme():
    """Return the tables of data/README.md as one: each column with its section and its meaning."""
    text = (DATA / "README.md").read_text(encoding="utf-8")
    rows = []
    for section, table in re.findall(r"<!-- columns of (\w+) -->\n\n(.*?)\n\n", text, re.S):
        for line in re.findall(r"^\| `(\w+)`( \(key\))? \| (.+) \|$", table, re.M):
            rows.append((section, *line))
    return pd.DataFrame(rows, columns=["section", "column", "key", "meaning"])


README = columns_of_the_readme()


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_a_section(section):
    """Its columns end in the common ones and a reason, and stand in the readme of the data."""
    assert section.columns[-7:] == ("note", *COMMON)
    assert len(set(section.columns)) == len(section.columns)
    said = README[README["section"] == section.name]
    assert list(said["column"]) == [*section.key, *section.values]
    is_key = said["column"].isin(section.key)
    assert (said["key"] == is_key.map({True: " (key)", False: ""})).all()


def test_a_column_means_the_same_and_is_of_one_kind_everywhere():
    assert (README.groupby("column")["meaning"].nunique() == 1).all()
    assert set(README["section"]) == set(SECTIONS)
    kinds = [*INTEGERS, *RESULTS, *FLAGS]
    assert set(kinds) <= {*README["column"], *COMMON}
    assert len(kinds) == len(set(kinds))


def test_make_runs_the_notebooks_of_the_registry():
    """Its wildcard is over notebooks/."""
    notebooks = {path.stem for path in (paths.ROOT / "notebooks").glob("*.ipynb")}
    assert set(map(attrgetter("notebook"), SECTIONS.values())) - {None, ""} == notebooks
