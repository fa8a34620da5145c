"""The assignment's questions: each is answered where the index says, by rows that are there."""

import re

import pytest

from a2lib.paths import ROOT
from a2lib.report import questions


@pytest.mark.parametrize("question", questions.load().values(), ids=lambda q: q.label)
def test_a_question_is_answered_in_a_fold_of_its_name_by_rows_of_its_part(question):
    line = re.compile(rf"^\| `{question.id}`(?: {re.escape(question.part)})? · (.*)$", re.M)
    shown = line.findall((ROOT / "book" / "questions.md").read_text(encoding="utf-8"))
    assert len(shown) == 1, "one line of the index for each part"
    assert shown[0].startswith(question.editions) and f'state("{question.label}")' in shown[0]
    if not question.page:
        assert questions.state(question.label) == "not measured yet" and "](#" not in shown[0]
        return
    assert f"](#{question.anchor})" in shown[0]
    text = (ROOT / "book" / f"{question.page}.md").read_text(encoding="utf-8")
    # The fold that has the question's own words.
    fold = re.search(rf"\n\({re.escape(question.anchor)}\)=\n:::+\{{dropdown\}} (.*)", text)
    assert question.id.removesuffix("_benchmarking") in fold[1] and question.part in fold[1]
    if question.section:
        assert question.has(question.rows)


def test_the_state_of_a_part_is_counted_from_its_own_rows(monkeypatch):
    """Other rows of its section do not answer it, and those that were lacking make it whole."""
    single = "distributed_communication_single_node"
    assert questions.state(single).startswith("partly")
    monkeypatch.setattr(questions.Question, "has", lambda self, query: 1)
    assert questions.state(single) == "whole" and questions.state("fsdp_calcs") == "derived"
    monkeypatch.setattr(questions.Question, "has", lambda self, query: 0)
    assert questions.state(single) == "not measured yet"
    assert questions.counts()["whole"] == sum(not q.section for q in questions.load().values())
