"""The registry, and everything that has to agree with it."""

import ast
import importlib
import re
import shutil

import pytest

from a2lib.measure.columns import COLUMNS
from a2lib.measure.section import COMMON
from a2lib.measure.sections import (
    DERIVED,
    SECTIONS,
    answers,
    notebooks,
    of_notebook,
    pages,
    readme_table,
)
from a2lib.paths import ROOT
from a2lib.report.chapters.questions import NOT_MEASURED, NOT_YET, QUESTIONS, index, standing

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
def test_its_handler_can_be_called_and_its_answers_are_anchors_of_its_pages(section):
    module, _, name = section.handler.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    texts = "".join((ROOT / "book" / f"{page}.md").read_text() for page in section.pages)
    for answer in section.answers:
        assert re.search(rf"^\({re.escape(answer.anchor)}\)=", texts, re.M), answer


@pytest.mark.parametrize("page", DERIVED)
def test_the_answers_of_a_page_that_derives_are_its_anchors(page):
    text = (ROOT / "book" / f"{page}.md").read_text()
    for answer in DERIVED[page]:
        assert re.search(rf"^\({re.escape(answer.anchor)}\)=", text, re.M), answer


def test_a_derived_answer_needs_no_row(tmp_path):
    shown = index("Parallelism on paper", [tmp_path]).text
    assert all(f"](#{a.anchor}) |" in shown for group in DERIVED.values() for a in group)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_the_readme_of_the_data_has_the_columns(section):
    text = (ROOT / "data" / "README.md").read_text()
    after = text.split(f"<!-- columns of {section.name} -->\n\n")
    assert len(after) == 2 and after[1].split("\n\n")[0] == readme_table(section)


def test_the_index_lists_every_question_once_and_links_what_is_answered():
    labels = [label for questions in QUESTIONS.values() for label, _ in questions]
    assert len(set(labels)) == len(labels) and set(answers()) <= set(labels)
    shown = "".join(index(group).text for group in QUESTIONS)
    assert shown.count(NOT_YET) == len(labels) - len(answers())
    assert all(f"[{a.title}](#{a.anchor})" in shown for a in answers().values())
    page = (ROOT / "book" / "questions.md").read_text()
    assert re.findall(r'^index\("(.*)"\)$', page, re.M) == list(QUESTIONS)


def test_the_index_says_what_the_published_device_has_not_measured(tmp_path):
    runs = (ROOT / "data" / "measured" / "runs.csv").read_text()
    flash = (ROOT / "data" / "measured" / "flash" / "nvidia-h200.csv").read_text()
    nothing = index("Attention", [tmp_path]).text
    assert nothing.count(NOT_MEASURED) == nothing.count("](#")
    (tmp_path / "measured" / "flash").mkdir(parents=True)
    (tmp_path / "measured" / "runs.csv").write_text(runs)
    (tmp_path / "measured" / "flash" / "cpu.csv").write_text(flash)
    assert index("Attention", [tmp_path]).text == nothing
    (tmp_path / "measured" / "flash" / "nvidia-h200.csv").write_text(flash)
    assert index("Attention", [tmp_path]).text.count(NOT_MEASURED) < nothing.count(NOT_MEASURED)


def test_the_first_page_says_how_many_questions_are_answered(tmp_path):
    total = sum(map(len, QUESTIONS.values()))
    derived = sum(map(len, DERIVED.values()))
    none = standing([tmp_path]).text
    assert none.startswith(
        f"Of {total} questions {derived} are answered; {len(answers()) - derived}"
    )
    left = total - len(answers())
    lacking = {0: ".", 1: "; one is not answered yet."}.get(left, f"; {left} are not answered yet.")
    here = standing([ROOT / "data"]).text
    assert none.endswith(f"rows of an NVIDIA H200{lacking}") and here.endswith(lacking)
    shown = "".join(index(group, [ROOT / "data"]).text for group in QUESTIONS)
    open_ = shown.count(NOT_YET) + shown.count(NOT_MEASURED)
    assert here.startswith(f"Of {total} questions {total - open_} are answered")
    assert "questions.standing()" in (ROOT / "book" / "index.md").read_text()


def test_warm_up_is_answered_by_its_own_rows(tmp_path):
    """Rows of the benchmark's table say nothing of the first steps of a process."""
    for name in ("runs.csv", "benchmark/nvidia-h200.csv"):
        (tmp_path / "measured" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "data" / "measured" / name, tmp_path / "measured" / name)
    lines = index("Profiling and benchmarking", [tmp_path]).text.splitlines()
    [times, warm] = [line for line in lines if "(b)" in line and "script" in line or "(c)" in line
                     and "script" in line]  # fmt: skip
    assert NOT_MEASURED not in times and NOT_MEASURED in warm


@pytest.mark.parametrize("path", HARNESS, ids=lambda path: path.stem)
def test_the_harness_names_no_section_and_no_column_of_one(path):
    of_sections = {*SECTIONS}.union(*((*s.key, *s.values) for s in SECTIONS.values()))
    # Words of any notebook.
    of_sections -= {"note", "size", "second", "error", "kernel", "part", "compile"}
    of_sections -= {"backend", "world_size", "launch", "memory"}
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        named |= {str(getattr(node, field, "")) for field in ("id", "attr", "arg", "value")}
    assert not named & of_sections
