"""``python -m a2lib.leaderboard``: what it refuses, says before, and prints.

The steps are checked in ranks, tests/parallel/checks_leaderboard.py; the protocol and the plans in
tests/experiments/leaderboard.
"""

import functools
import json
import math
from types import SimpleNamespace

import pytest
from refusals import refused_command

from a2lib.lab import memory
from a2lib.leaderboard import LADDER, Step, run
from a2lib.leaderboard import __main__ as command
from a2lib.theory.transformer import SIZES, forward_flops, parameter_count

SMALL = ["--size=tiny", "--num-layers=3", "--context=16"]


@pytest.fixture(autouse=True)
def no_gpu(request):
    if "gpu" not in request.keywords:
        request.getfixturevalue("gpus")(0)


def test_what_it_refuses_is_one_line(capsys):
    for given, complaint in {
        "--way=fast": "way 'fast': allowed are recomputed, attention_kept, fused_head",
        "--way=own_attention": "way 'own_attention': allowed without a GPU are recomputed, ",
        "--size=7B": "size '7B': allowed are tiny, small, medium",
        "--layers=4": "unknown --layers=4 (did you mean --num-layers?); allowed are --help, --way",
        "--num-layers=100 --size=10B": "GB are left here; allowed is what fits: a smaller model",
    }.items():
        assert complaint in refused_command(command.main, given.split(), capsys)


def test_the_board_s_step_is_the_default_on_two_gpus(gpus, capsys):
    gpus(2)
    step, device, given = command.parse([])
    assert (device, step.way, step.shape) == ("cuda", LADDER[-1], SIZES["8B"])
    assert (step.batch, step.context, step.dtype, step.attention) == (1, 32_768, "bf16", "flash")
    assert (step.warmup_ms, step.rep_ms, given.processes) == (10_000, 30_000, 2)
    assert command.parse(["--way=own_fsdp"])[0].attention == "sdpa_cudnn"
    line = refused_command(command.parse, ["--processes=3"], capsys)
    assert "processes is 3; allowed are from 1 to 2, the GPUs here" in line


def test_memory_that_will_not_suffice_is_said(gpus, monkeypatch):
    """State and what a block keeps at the least; a CPU has it of all ranks, a GPU of one."""
    gpus(2)
    step = command.parse(["--way=attention_kept"])[0]
    tokens, d = 32_768, 4096
    least = 6 * parameter_count(SIZES["8B"]) + 34 * tokens * (6 * d + 4 * 32)
    assert least < step.rank_bytes(2) < 1.5 * least
    assert command.parse(["--way=recomputed"])[0].rank_bytes(2) < step.rank_bytes(2)
    monkeypatch.setattr(memory, "free_bytes", lambda device: step.rank_bytes(2))
    assert run.too_large(step, "cuda", 2) == ""
    assert "a step takes some " in run.too_large(step, "cpu", 2)
    assert "GB are left here" in run.too_large(step, "cuda", 1)


def test_a_process_that_fails_is_told_with_its_reason(monkeypatch, capsys):
    def launch(*_, **options):
        assert options["processes"] == 2
        options["on_progress"](0, {"moment": "phases"})
        raise command.LaunchError("rank 1 of 2: MemoryError\n\nTraceback")

    monkeypatch.setattr(command, "launch", launch)
    assert command.main(SMALL) == 1
    out, err = capsys.readouterr()
    assert out == "" and "s: phases\n" in err
    assert f"{command.PROGRAM}: rank 1 of 2: MemoryError" in err


def test_a_share_of_the_peak_where_that_is_known():
    step = SimpleNamespace(flops=494.7e12)
    assert command.of_peak(step, {"ms": 1000, "slug": "nvidia-h200"}) == pytest.approx(
        {"tflops": 494.7, "mfu": 0.5}
    )
    assert command.of_peak(step, {"ms": 1000, "slug": "cpu"})["mfu"] is None


@pytest.mark.slow
def test_a_step_of_one_process(capsys):
    assert command.main([*SMALL, "--processes=1", "--json"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["way"]["name"] == "offloaded" and row["processes"] == 1 and row["mfu"] is None
    assert 0 < row["ms_min"] <= row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert row["ms_ready"] > 0 and row["products_again"] == row["host_bytes"] == 0
    assert abs(row["loss"] - math.log(128)) < 1 and row["gradient_norm"] > 0
    # Forward, and a backward of twice that; causal attention is half of what that counts.
    shape = command.parse(SMALL)[0].shape
    counted = 3 * (forward_flops(shape, 1, 16) - 2 * 16**2 * 3 * shape.d_model)
    assert row["tflops"] == pytest.approx(counted / row["ms"] / 1e9)
    for words in ("(num_layers 3)", "forward", "no peak of this device", "ready after "):
        assert words in err
    assert "s: warm-up and timed steps" in err


@pytest.mark.gpu
def test_the_fastest_way_on_a_gpu(monkeypatch, capsys):
    short = functools.partial(Step.on, warmup_ms=1, rep_ms=1)
    monkeypatch.setattr(Step, "on", short)
    given = ["--size=small", "--num-layers=2", "--context=256", "--processes=1"]
    assert command.main([*given, "--json"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert (row["way"]["name"], row["dtype"]) == ("own_attention", "bf16")
    assert 0 < row["kept_bytes"] < row["allocated_bytes"] <= row["reserved_bytes"]
    assert "peak memory " in err and row["device"] in err
