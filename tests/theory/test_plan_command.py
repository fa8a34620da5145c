"""The planner's command: what it prints, holds and refuses."""

from dataclasses import asdict

import pytest
from refusals import refused_command

from a2lib.theory import __main__ as command
from a2lib.theory import layouts, planner
from a2lib.theory.devices import DEVICES
from a2lib.theory.layouts import Job, Layout
from a2lib.theory.transformer import SIZES, GroupedShape


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
