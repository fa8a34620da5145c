"""python -m a2lib.theory, its answers by JSON and as a table."""

import json
import math
import subprocess
import sys

import pytest

from a2lib.report import questions
from a2lib.theory import __main__ as command
from a2lib.theory import answers, parallelism
from a2lib.theory.accounting import Mesh

PARTS = {"communication_accounting": "abcd", "alternate_ring_all_reduce": None}
PARTS |= {"data_parallel_calcs": "abc", "fsdp_calcs": "abc"}
PARTS |= {"tp_calcs": "abcd", "fsdp_tp_calcs": "abcd"}


@pytest.fixture
def printed(capsys):
    """``printed(line)``: what the command prints; with --json the object."""

    def run(line=""):
        assert command.main(line.split()) == 0
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


def test_values_are_the_theorys(printed):
    found = printed("--json --tokens 4096 --devices 4")
    [limit] = found["data_parallel_calcs"]["c"]
    layer = parallelism.EXAMPLE
    assert limit["value"] == pytest.approx(1 + 4096 * layer.bandwidth / layer.flops)
    backward, forward = found["fsdp_calcs"]["a"]
    assert backward["quantity"] == "FLOPs backward, per device"
    assert backward["value"] == 12 * 4096 * layer.d_model * layer.d_ff / 4
    assert forward["value"] == backward["value"] / 2
    assert found["tp_calcs"]["a"][0]["value"][-1].startswith("dx = all-reduce")
    tokens, batch = found["communication_accounting"]["c"]
    assert (tokens["value"], batch["value"]) == (Mesh().least_tokens(), Mesh().batch())
    sizes = {one["quantity"]: one["value"] for one in found["communication_accounting"]["b"]}
    assert sizes["N_FSDP with the activations of 0 tokens"] == 38
    held = sizes["memory per device of 38, with the activations of 0 tokens"]
    assert held == pytest.approx(16 * 219_848_638_464 / 38 / 1e9)


def test_the_table_has_every_answer(printed):
    text = printed()
    for answer in answers.all_answers():
        assert answer.quantity in text and answer.assumption in text and answer.formula in text
        assert not isinstance(answer.value, float) or math.isfinite(answer.value)
    assert "219,848,638,464" in text and "dx = all-reduce" in text


def test_the_command_needs_no_torch_and_no_numpy():
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'pandas'): sys.modules[name] = None\n"
        "sys.argv = ['a2lib.theory', '--json']\n"
        "runpy.run_module('a2lib.theory', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == set(PARTS)
