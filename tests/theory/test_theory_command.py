"""python -m a2lib.theory: every question and part, by JSON and as a table."""

import json
import math
import subprocess
import sys

import pytest
from refusals import refused_command

from a2lib.report import questions
from a2lib.theory import __main__ as command
from a2lib.theory import answers, parallelism
from a2lib.theory.accounting import Mesh

PARTS = {
    "communication_accounting": "abcd", "alternate_ring_all_reduce": None,
    "data_parallel_calcs": "abc", "fsdp_calcs": "abc", "tp_calcs": "abcd", "fsdp_tp_calcs": "abcd",
}  # fmt: skip


def test_every_question_on_paper_has_its_parts(printed):
    found = printed("--json")
    assert {q: list(parts) for q, parts in found.items()} == {
        question: list(parts or [answers.WHOLE]) for question, parts in PARTS.items()
    }
    asked = {q.id for q in questions.load().values() if q.group == "Parallelism on paper"}
    assert asked == {*PARTS, "leaderboard"}
    for parts in found.values():
        for quantities in parts.values():
            for one in quantities:
                assert set(one) == {"quantity", "formula", "value", "unit", "assumption"}
                assert all(one.values()), one
            names = [(one["quantity"], one["unit"], one["assumption"]) for one in quantities]
            assert len(set(names)) == len(names)


def test_values_are_the_theorys(printed):
    found = printed("--json", "--tokens", "4096", "--devices", "4")
    [limit] = found["data_parallel_calcs"]["c"]
    layer = parallelism.EXAMPLE
    assert limit["value"] == pytest.approx(1 + 4096 * layer.bandwidth / layer.flops)
    backward, forward = found["fsdp_calcs"]["a"]
    assert (backward["quantity"], backward["value"]) == (
        "FLOPs backward, per device", 12 * 4096 * layer.d_model * layer.d_ff / 4,
    )  # fmt: skip
    assert forward["value"] == backward["value"] / 2
    assert found["tp_calcs"]["a"][0]["value"][-1].startswith("dx = all-reduce")
    ours = [one for one in found["communication_accounting"]["c"] if "our" in one["assumption"]]
    assert [one["value"] for one in ours] == [Mesh().least_tokens(), Mesh().batch()]
    held = [one for one in found["communication_accounting"]["b"] if one["unit"] == "GB"]
    devices = [one["value"] for one in found["communication_accounting"]["b"]
               if one["quantity"].startswith("N_FSDP")][0::2]  # fmt: skip
    assert [f"memory per device of {n}," in one["quantity"]
            for one, n in zip(held, devices, strict=True)] == [True, True]  # fmt: skip
    assert held[0]["value"] == pytest.approx(16 * 219_848_638_464 / 38 / 1e9)


def test_the_table_has_every_answer(printed):
    text = printed()
    for answer in answers.all_answers():
        assert answer.quantity in text and answer.assumption in text and answer.formula in text
    assert "219,848,638,464" in text and "dx = all-reduce" in text
    assert command.shown(None) == "none" and command.shown(1234.5) == "1,234.5"
    assert all(not isinstance(a.value, float) or math.isfinite(a.value)
               for a in answers.all_answers())  # fmt: skip


@pytest.mark.parametrize("given, words", [
    (["--tokens", "0"], "argument --tokens: 0: allowed are whole numbers from 1 to 1000000000000"),
    (["--devices", "-2"], "argument --devices: -2: allowed are whole numbers from 1 to 10000000"),
    (["--jsn"], "unknown --jsn (did you mean --json?); allowed are --help"),
])  # fmt: skip
def test_a_wrong_number_is_one_line(given, words, capsys):
    line = refused_command(command.main, given, capsys)
    assert line.startswith(f"python -m a2lib.theory: {words}")
    assert line.endswith(" (--help explains)")


@pytest.mark.parametrize("arguments", [["--json"], ["plan", "--json"]])
def test_the_commands_need_no_torch_and_no_numpy(arguments):
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'pandas'): sys.modules[name] = None\n"
        f"sys.argv = {['a2lib.theory', *arguments]!r}\n"
        "runpy.run_module('a2lib.theory', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"]["devices"] == 2 if arguments[0] == "plan" else set(found) == set(PARTS)
