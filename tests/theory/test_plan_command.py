"""The planner's command: what it prints, holds and refuses."""

from dataclasses import asdict

import pytest
from refusals import refused_command

from a2lib.theory import __main__ as command
from a2lib.theory import layouts, planner
from a2lib.theory.devices import DEVICES
from a2lib.theory.layouts import Job
from a2lib.theory.transformer import SIZES, GroupedShape


def test_the_command_prints_the_plan(printed):
    arguments = ["plan", "--devices", "8", "--batch", "16", "--context", "2048"]
    found = printed(*arguments, "--json")
    one = Job(SIZES["8B"], DEVICES["H200"], 8, 16, 2048)
    plan = planner.search(one)
    assert found["layout"] == {**asdict(plan.layout), "devices": plan.layout.devices}
    assert found["step_s"] == plan.step_s and found["bound"] == plan.bound
    assert found["flops_share"] == layouts.flops_share(one, plan.layout, plan.step_s)
    total = found["memory_bytes"].pop("total")
    assert total == pytest.approx(plan.memory_bytes)
    assert sum(v for k, v in found["memory_bytes"].items() if k != "allowed") == total
    assert found["assumptions"] == list(layouts.ASSUMPTIONS)
    text = printed(*arguments)
    for words in (*plan.memory, *plan.busy, *layouts.ASSUMPTIONS, f"{plan.step_s:.4g} s"):
        assert words in text


def test_the_command_holds_what_is_given(printed):
    held = ["--tensor", "2", "--pipeline", "1", "--context-parallel", "2", "--data", "1",
            "--microbatches", "1", "--sharding", "fsdp", "--checkpointing", "block"]  # fmt: skip
    sizes = ["--size", "small", "--layers", "6", "--d-ff", "64", "--heads", "6", "--vocab", "100",
             "--d-model", "24", "--kv-heads", "2", "--tied", "--device", "B200",
             "--devices", "9"]  # fmt: skip
    job = {"precision": "fp32", "optimizer": "momentum", "efficiency": 0.5}
    sizes += [f"--{name}={value}" for name, value in job.items()]
    found = printed("plan", *sizes, *held, "--json", "--hidden", "none")
    assert found["layout"] == {
        "data": 1, "tensor": 2, "pipeline": 1, "context": 2, "microbatches": 1,
        "sharding": "fsdp", "checkpointing": "block", "chunks": 1, "sequence": True, "expert": 1,
        "schedule": "1f1b", "devices": 4}  # fmt: skip
    shape = asdict(GroupedShape(24, 64, 6, 6, 100, num_kv_heads=2, tied=True))
    assert {name: found["model"][name] for name in shape} == shape
    assert found["device"]["slug"] == "nvidia-b200" and found["devices"] == 9
    assert {name: found[name] for name in job} == job and found["fits"] is True


def test_the_command_has_experts_and_zero_bubble(printed):
    given = ["plan", "--as-given", "--size", "DeepSeek-V3", "--devices", "64", "--data", "16",
             "--pipeline", "4", "--expert", "8", "--schedule", "zb-h1", "--microbatches", "4",
             "--batch", "64", "--sharding", "zero1", "--context", "4096"]  # fmt: skip
    found = printed(*given, "--json")
    assert found["model"]["active_parameters"] == 37_552_297_472 and found["all_tried"]
    assert (found["layout"]["expert"], found["layout"]["schedule"]) == (8, "zb-h1")
    text = printed(*given)
    assert "experts 256, top_k 8, shared 1" in text
    assert "expert 8, schedule zb-h1" in text
    # as its sizes say it, without the preset
    sizes = ["--d-model", "7168", "--d-ff", "18432", "--layers", "61", "--heads", "128",
             "--vocab", "129280", "--experts", "256", "--top-k", "8", "--shared", "1",
             "--dense", "3", "--nodes", "4", "--head-size", "128", "--q-rank", "1536",
             "--kv-rank", "512", "--rope", "64"]  # fmt: skip
    assert printed("plan", "--as-given", *sizes, *given[4:], "--json") == found


def test_a_search_that_left_layouts_out_says_so(printed, monkeypatch):
    monkeypatch.setattr(planner, "MOST_COUNTED", 100)
    given = ["plan", "--devices", "64", "--batch", "5040", "--context", "5040", "--hidden", "all"]
    assert printed(*given, "--json")["all_tried"] is False
    assert "not all tried: the best of some" in printed(*given)


@pytest.mark.parametrize("given, words", [
    (["--device", "A9"], "device 'A9': allowed are H100, H200, H800, A100, B200"),
    (["--devices", "-2"], "argument --devices: -2: allowed are whole numbers from 1 to 1048576"),
    (["--devices", "1"], "of the 126.9 GB allowed on each"),
    (["--size", "9B"], "size '9B': allowed are small"),
    (["--size", "Llama-3-8B", "--tensor", "16"], "tensor 16 does not divide num_kv_heads 8; it m"),
    (["--hidden", "1.5"], "hidden '1.5': allowed are all, data, none, numbers from 0 to 1"),
    (["--activations", "flash"], "activations 'flash': allowed are library, fused"),
    (["--frozen", "1"], "argument --frozen: 1: allowed are numbers from 0 to 0.9999"),
    (["--kv-heads", "5"], "num_kv_heads 5 does not divide num_heads 32; it must"),
])  # fmt: skip
def test_a_wrong_option_ends_the_command_with_one_line(given, words, capsys):
    line = refused_command(command.main, ["plan", *given], capsys)
    assert line.startswith("python -m a2lib.theory plan: ") and words in line


def test_the_command_takes_measured_links(printed, capsys):
    given = ["plan", "--devices", "2", "--batch", "2", "--context", "1024", "--size", "small",
             "--tensor", "2", "--json"]  # fmt: skip
    makers, own = printed(*given), printed(*given, "--bandwidth", "2.25e11", "--latency-us", "20")
    assert makers["device"]["latency"] == 0
    assert (own["device"]["link"], own["device"]["latency"]) == (2.25e11, 20e-6)
    sums = 10 * SIZES["small"].num_layers + 5
    before, after = (found["busy_s"]["node links"] for found in (makers, own))
    assert after == pytest.approx(2 * before + 20e-6 * sums)
    assert "link 450 GB/s, latency 20 us" in printed(*given[:-1], "--latency-us", "20")
    for wrong, words in ((["--bandwidth", "0"], "allowed are numbers from 1000 to 1e+18"),
                         (["--latency-us", "-1"], "allowed are numbers from 0 to 1e+09"),
                         (["--latency-us", "nan"], "allowed are numbers from 0")):  # fmt: skip
        assert words in refused_command(command.main, [*given, *wrong], capsys)
