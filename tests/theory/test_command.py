"""python -m a2lib.theory, its answers by JSON and as a table."""

import json
import math

import pytest

from a2lib.report import questions
from a2lib.theory import __main__ as command
from a2lib.theory import answers

PARTS = {"communication_accounting": "abcd", "alternate_ring_all_reduce": None}
PARTS |= {"data_parallel_calcs": "abc", "fsdp_calcs": "abc"}
PARTS |= {"tp_calcs": "abcd", "fsdp_tp_calcs": "abcd"}


@pytest.fixture
def printed(capsys):
    """``printed(line)``: what the command prints; with --json the object."""

    def run(line=""):
        command.main(line.split())
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in line else text

    return run


def test_every_question_on_paper_has_its_parts(printed):
    found = printed("--json")
    assert set(found) == set(PARTS)
    asked = {q.id for q in questions.load().values() if q.group == "Parallelism on paper"}
    assert asked == {*PARTS, "leaderboard"}
    for question, parts in found.items():
        assert list(parts) == list(PARTS[question] or [answers.WHOLE])
        for quantities in parts.values():
            names = set()
            for one in quantities:
                assert set(one) == {"quantity", "formula", "value", "unit", "assumption"}
                assert all(one.values()), one
                names.add((one["quantity"], one["unit"], one["assumption"]))
            assert len(names) == len(quantities)


def test_the_table_has_every_answer(printed):
    text = printed()
    for answer in answers.all_answers():
        assert answer.quantity in text and answer.assumption in text and answer.formula in text
        assert not isinstance(answer.value, float) or math.isfinite(answer.value)
    assert "219,848,638,464" in text and "dx = all-reduce" in text


def test_a_number_that_is_none_is_refused(capsys):
    for option in ("--tokens=0", "--flops=nan", "--devices=-1"):
        with pytest.raises(SystemExit):
            command.main([option])
        assert "allowed are numbers above 0" in capsys.readouterr().err
