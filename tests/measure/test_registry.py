"""The registry, and everything that has to agree with it."""

import ast
import importlib
import re

import pytest

from a2lib.measure.columns import COLUMNS
from a2lib.measure.section import COMMON
from a2lib.measure.sections import (
    DERIVED,
    SECTIONS,
    notebooks,
    of_notebook,
    pages,
    readme_table,
)
from a2lib.paths import ROOT
from a2lib.report import questions

HARNESS = sorted((ROOT / "src" / "a2lib" / "experiments" / "harness").glob("*.py"))


def test_every_column_has_a_meaning_and_no_other_has():
    used = {*COMMON}.union(*(section.columns for section in SECTIONS.values()))
    assert used == set(COLUMNS)


def test_make_runs_the_notebooks_of_the_registry():
    """Its wildcard is over notebooks/."""
    assert sorted(notebooks()) == sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
    assert {s for name in notebooks() for s in of_notebook(name)} == set(SECTIONS.values())


def test_every_page_is_in_the_contents():
    named = re.findall(r"(?:root|file): *(\S+)", (ROOT / "_toc.yml").read_text())
    assert set(pages()) <= set(named)
    assert all((ROOT / "book" / f"{page}.md").is_file() for page in pages())


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_its_handler_can_be_called(section):
    module, _, name = section.handler.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("question", questions.load().values(), ids=lambda q: q.label)
def test_a_question_is_answered_at_an_anchor_of_its_page_by_rows_of_its_part(question):
    line = re.compile(rf"^\| `{question.id}`(?: {re.escape(question.part)})? · (.*)$", re.M)
    shown = line.findall((ROOT / "book" / "questions.md").read_text(encoding="utf-8"))
    assert len(shown) == 1, "one line of the index for each part"
    assert shown[0].startswith(question.editions) and f'state("{question.label}")' in shown[0]
    if not question.page:
        assert questions.state(question.label) == "not measured yet" and "](#" not in shown[0]
        return
    assert f"](#{question.anchor})" in shown[0]
    text = (ROOT / "book" / f"{question.page}.md").read_text(encoding="utf-8")
    assert f"\n({question.anchor})=\n" in text
    assert (question.page in DERIVED) == (not question.section)
    if question.section:
        assert question.page in pages() and question.has(question.rows)


def test_the_state_of_a_part_is_counted_from_its_own_rows(monkeypatch):
    """Other rows of its section do not answer it, and those that were lacking make it whole."""
    warm = "benchmarking_script (c)"
    assert questions.state(warm).startswith("partly")
    monkeypatch.setattr(questions.Question, "has", lambda self, query: 1)
    assert questions.state(warm) == "whole" and questions.state("fsdp_calcs") == "derived"
    monkeypatch.setattr(questions.Question, "has", lambda self, query: 0)
    assert questions.state(warm) == "not measured yet"
    assert questions.counts()["whole"] == sum(not q.section for q in questions.load().values()) - 1


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_the_readme_of_the_data_has_the_columns(section):
    text = (ROOT / "data" / "README.md").read_text()
    after = text.split(f"<!-- columns of {section.name} -->\n\n")
    assert len(after) == 2 and after[1].split("\n\n")[0] == readme_table(section)


@pytest.mark.parametrize("path", HARNESS, ids=lambda path: path.stem)
def test_the_harness_names_no_section_and_no_column_of_one(path):
    of_sections = {*SECTIONS}.union(*((*s.key, *s.values) for s in SECTIONS.values()))
    # Words of any notebook.
    of_sections -= {"note", "size", "second", "error", "kernel", "part", "compile"}
    of_sections -= {"backend", "world_size", "launch", "memory", "ms_mean", "ms_std"}
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        named |= {str(getattr(node, field, "")) for field in ("id", "attr", "arg", "value")}
    assert not named & of_sections
