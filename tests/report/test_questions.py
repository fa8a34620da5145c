"""The assignment's questions: each is answered where the index says, by rows that are there."""

import re
from operator import attrgetter

import pytest

from a2lib.paths import ROOT
from a2lib.report import questions

# Each id of the two handouts.
HANDOUTS = """
benchmarking_script nsys_profile mixed_precision_accumulation benchmarking_mixed_precision
memory_profiling gradient_checkpointing pytorch_attention torch_compile flash_forward flash_backward
flash_benchmarking leaderboard distributed_communication_single_node naive_ddp
naive_ddp_benchmarking minimal_ddp_flat_benchmarking ddp_overlap_individual_parameters
ddp_overlap_individual_parameters_benchmarking ddp_overlap_bucketed ddp_bucketed_benchmarking
optimizer_state_sharding optimizer_state_sharding_accounting fsdp fsdp_accounting
communication_accounting alternate_ring_all_reduce data_parallel_calcs fsdp_calcs tp_calcs
fsdp_tp_calcs
""".split()


def test_no_problem_of_the_handouts_is_left_out():
    assert set(map(attrgetter("id"), questions.load().values())) == set(HANDOUTS)


EDITIONS = {"25, 26": "", "25": " · 2025 only", "26": " · 2026 only"}


@pytest.mark.parametrize("question", questions.load().values(), ids=lambda q: q.label)
def test_a_question_is_printed_and_answered_in_a_fold_of_its_name_by_rows_of_its_part(question):
    # The first part of each problem has an id, to jump to.
    part = f" {question.part}".rstrip() + EDITIONS[question.editions]
    name = rf"`{question.id}`(?:\{{#q-[\w-]+\}})?{re.escape(part)}"
    entry = re.compile(rf"^{name}\n: (.+)\n\n  (.+)$", re.M)
    entries = entry.findall((ROOT / "book" / "questions.md").read_text(encoding="utf-8"))
    assert len(entries) == 1, "one entry of the index for each part"
    asked, answer = entries[0]
    assert len(asked) > 20 and len(answer) > 40
    # What is not fully answered by measurements says so.
    state = questions.state(question.label)
    assert (f'state("{question.label}")' in answer) == (state != "answered")
    if not question.page:
        assert state == "not measured yet" and "](#" not in answer
        return
    assert f"](#{question.anchor})" in answer
    text = (ROOT / "book" / f"{question.page}.md").read_text(encoding="utf-8")
    # The fold that has the question's own words.
    fold = re.search(rf"\n\({re.escape(question.anchor)}\)=\n:::+\{{dropdown\}} (.*)", text)
    assert question.id.removesuffix("_benchmarking") in fold[1] and question.part in fold[1]
    if question.section:
        assert questions.count(question.section, question.rows)


def test_the_state_of_a_part_is_counted_from_its_own_rows(monkeypatch):
    """Other rows of its section do not answer it; with those that were lacking it is answered."""
    single = "distributed_communication_single_node"
    parts = questions.load().values()
    measured = list(filter(attrgetter("section"), parts))
    assert questions.state(single).startswith("partly answered; not measured yet: NCCL")
    monkeypatch.setattr(questions, "count", lambda section, query: 1)
    assert questions.state(single) == "answered"
    assert questions.state("fsdp_calcs") == "derived on paper"
    monkeypatch.setattr(questions, "count", lambda section, query: 0)
    assert questions.state(single) == "not measured yet"
    counts = questions.counts()
    assert counts["open"] == len(measured) and counts["derived"] == len(parts) - len(measured)
    assert counts["answered"] == counts["partly"] == 0
