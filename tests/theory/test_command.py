"""python -m a2lib.theory, its answers by JSON and as a table; and its planner."""

import json
import math
import subprocess
import sys
from dataclasses import asdict

import pytest
from refusals import refused_command

from a2lib.report import questions
from a2lib.theory import __main__ as command
from a2lib.theory import answers, layouts, parallelism, planner
from a2lib.theory.accounting import Mesh
from a2lib.theory.devices import DEVICES
from a2lib.theory.layouts import Job, Layout
from a2lib.theory.transformer import SIZES, GroupedShape

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
    found = printed("--json --tokens 4096 --devices 4")
    [limit] = found["data_parallel_calcs"]["c"]
    layer = parallelism.EXAMPLE
    assert limit["value"] == pytest.approx(1 + 4096 * layer.bandwidth / layer.flops)
    backward, forward = found["fsdp_calcs"]["a"]
    assert backward["quantity"] == "FLOPs backward, per device"
    assert backward["value"] == 12 * 4096 * layer.d_model * layer.d_ff / 4
    assert forward["value"] == backward["value"] / 2
    assert found["tp_calcs"]["a"][0]["value"][-1].startswith("dx = all-reduce")
    memory, batch = (found["communication_accounting"][part] for part in "bc")
    ours = [one for one in batch if "our" in one["assumption"]]
    assert [one["value"] for one in ours] == [Mesh().least_tokens(), Mesh().batch()]
    held = [one for one in memory if one["unit"] == "GB"]
    devices = [one["value"] for one in memory if one["quantity"].startswith("N_FSDP")][0::2]
    assert len(held) == 2
    for one, n in zip(held, devices, strict=True):
        assert f"memory per device of {n}," in one["quantity"]
    assert held[0]["value"] == pytest.approx(16 * 219_848_638_464 / 38 / 1e9)


def test_the_table_has_every_answer(printed):
    text = printed()
    for answer in answers.all_answers():
        assert answer.quantity in text and answer.assumption in text and answer.formula in text
        assert not isinstance(answer.value, float) or math.isfinite(answer.value)
    assert "219,848,638,464" in text and "dx = all-reduce" in text
    assert command.shown(None) == "none" and command.shown(1234.5) == "1,234.5"


def test_an_unknown_option_is_one_line(capsys):
    line = refused_command(command.main, ["--jsn"], capsys)
    words = "unknown --jsn (did you mean --json?); allowed are --help"
    assert line.startswith(f"python -m a2lib.theory: {words}")
    assert line.endswith(" (--help explains)")


def test_the_command_prints_the_plan(printed):
    line = "plan --devices 8 --batch 16 --context 2048"
    found = printed(f"{line} --json")
    one = Job(SIZES["8B"], DEVICES["H200"], 8, 16, 2048)
    plan = planner.search(one)
    assert found["layout"] == {**asdict(plan.layout), "devices": plan.layout.devices}
    assert found["step_s"] == plan.step_s and found["bound"] == plan.bound
    assert found["flops_share"] == layouts.flops_share(one, plan.layout, plan.step_s)
    total = found["memory_bytes"].pop("total")
    assert total == pytest.approx(plan.memory_bytes)
    assert sum(v for k, v in found["memory_bytes"].items() if k != "allowed") == total
    assert found["assumptions"] == list(layouts.ASSUMPTIONS)
    text = printed(line)
    for words in (*plan.memory, *plan.busy, *layouts.ASSUMPTIONS, f"{plan.step_s:.4g} s"):
        assert words in text


def test_the_command_holds_what_is_given(printed):
    line = "plan --tensor 2 --pipeline 1 --context-parallel 2 --data 1 --microbatches 1 "
    line += "--sharding fsdp --checkpointing block --device B200 --devices 9 --json --hidden none "
    line += "--size small --layers 6 --d-ff 64 --heads 6 --vocab 100 --d-model 24 --kv-heads 2 "
    line += "--tied --precision fp32 --optimizer momentum --efficiency 0.5"
    found = printed(line)
    layout = Layout(1, 2, 1, 2, 1, "fsdp", "block")
    assert found["layout"] == asdict(layout) | {"devices": 4}
    shape = asdict(GroupedShape(24, 64, 6, 6, 100, num_kv_heads=2, tied=True))
    assert {name: found["model"][name] for name in shape} == shape
    assert found["device"]["slug"] == "nvidia-b200" and found["devices"] == 9
    job = {"precision": "fp32", "optimizer": "momentum", "efficiency": 0.5, "fits": True}
    assert {name: found[name] for name in job} == job


def test_the_command_has_experts_and_zero_bubble(printed):
    job = "plan --as-given --devices 64 --batch 64 --context 4096 --data 16 --pipeline 4 "
    job += "--expert 8 --schedule zb-h1 --microbatches 4 --sharding zero1"
    found = printed(f"{job} --size DeepSeek-V3 --json")
    assert found["model"]["active_parameters"] == 37_552_297_472 and found["all_tried"]
    assert (found["layout"]["expert"], found["layout"]["schedule"]) == (8, "zb-h1")
    text = printed(f"{job} --size DeepSeek-V3")
    assert "experts 256, top_k 8, shared 1" in text
    assert "expert 8, schedule zb-h1" in text
    # as its sizes say it, without the preset
    sizes = "--d-model 7168 --d-ff 18432 --layers 61 --heads 128 --vocab 129280 --experts 256 "
    sizes += "--top-k 8 --shared 1 --dense 3 --nodes 4 --head-size 128 --q-rank 1536 --kv-rank 512"
    assert printed(f"{job} {sizes} --rope 64 --json") == found


def test_a_search_that_left_layouts_out_says_so(printed, monkeypatch):
    monkeypatch.setattr(planner, "MOST_COUNTED", 100)
    line = "plan --devices 64 --batch 5040 --context 5040 --hidden all"
    assert printed(f"{line} --json")["all_tried"] is False
    assert "not all tried: the best of some" in printed(line)


def test_a_wrong_option_ends_the_command_with_one_line(capsys):
    """That of a number beyond its bounds is one of tests/setup/test_command_lines.py."""
    for given, words in {
        "--device A9": "device 'A9': allowed are H100, H200, H800, A100, B200",
        "--devices 1": "of the 126.9 GB allowed on each",
        "--size 9B": "size '9B': allowed are small",
        "--size Llama-3-8B --tensor 16": "tensor 16 does not divide num_kv_heads 8; it must",
        "--hidden 1.5": "hidden '1.5': allowed are all, data, none, numbers from 0 to 1",
        "--activations flash": "activations 'flash': allowed are library, fused",
        "--shared 3": "d_ff 11008 of 0 + 3 experts; it must be",
        "--kv-heads 5": "num_kv_heads 5 does not divide num_heads 32; it must",
    }.items():
        line = refused_command(command.main, ["plan", *given.split()], capsys)
        assert line.startswith("python -m a2lib.theory plan: ") and words in line


def test_the_command_takes_measured_links(printed):
    line = "plan --devices 2 --batch 2 --context 1024 --size small --tensor 2 --latency-us"
    makers, own = printed(f"{line} 0 --json"), printed(f"{line} 20 --bandwidth 2.25e11 --json")
    assert makers["device"]["latency"] == 0
    assert (own["device"]["link"], own["device"]["latency"]) == (2.25e11, 20e-6)
    sums = 10 * SIZES["small"].num_layers + 5
    before, after = (found["busy_s"]["node links"] for found in (makers, own))
    assert after == pytest.approx(2 * before + 20e-6 * sums)
    assert "link 450 GB/s, latency 20 us" in printed(f"{line} 20")


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
