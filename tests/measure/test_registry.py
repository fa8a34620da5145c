"""The registry, and everything that has to agree with it."""

import importlib
import re

import pytest

from a2lib.measure.sections import COMMON, FLAGS, INTEGERS, RESULTS, SECTIONS
from a2lib.paths import ROOT

# A table of data/README.md: its section, and its rows as (column, " (key)" or "", meaning).
README = {
    name: re.findall(r"^\| `(\w+)`( \(key\))? \| (.+) \|$", table, re.M)
    for name, table in re.findall(
        r"<!-- columns of (\w+) -->\n\n(.*?)\n\n",
        (ROOT / "data" / "README.md").read_text(encoding="utf-8"),
        re.S,
    )
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_a_section(section):
    """Its columns end in the common ones and a reason, stand in the readme of the data, and its
    handler can be called."""
    assert section.columns[-7:] == ("note", *COMMON)
    assert len(set(section.columns)) == len(section.columns)
    expected = [(c, " (key)") for c in section.key] + [(c, "") for c in section.values]
    assert [(column, key) for column, key, _ in README[section.name]] == expected
    module, _, name = section.handler.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_a_column_means_the_same_and_is_of_one_kind_everywhere():
    meanings = {(column, meaning) for rows in README.values() for column, _, meaning in rows}
    used = {column for column, _ in meanings}
    assert len(meanings) == len(used) and set(README) == set(SECTIONS)
    kinds = INTEGERS, RESULTS, FLAGS
    assert set().union(*kinds) <= used | set(COMMON)
    assert sum(map(len, kinds)) == len(set().union(*kinds))


def test_make_runs_the_notebooks_of_the_registry():
    """Its wildcard is over notebooks/."""
    found = {s.notebook for s in SECTIONS.values()}
    assert found == {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")}
