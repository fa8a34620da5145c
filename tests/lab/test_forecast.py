"""Before a run that takes minutes on a CPU stands how long, and how to make it smaller."""

import re

import pytest

from a2lib.lab import forecast
from a2lib.shapes import SIZES
from a2lib.theory.transformer import step_flops

ATTENTION = {"implementation": "eager", "dtype": "fp32", "batch": 1, "heads": 1, "head_dim": 64}
STEP = {"model": "small", "context": 512, "batch": 4, "mode": "train-step"}


@pytest.fixture
def said(monkeypatch, capsys):
    """``said(tasks, device)``: what a CPU of 100 GFLOP/s is told, which is in the cell as well."""
    monkeypatch.setattr(forecast, "flops_per_s", lambda: 1e11)

    def call(tasks, device="cpu"):
        forecast.forecast(tasks, device)
        return capsys.readouterr().out

    return call


def attention(seq_len, pass_="forward"):
    return {**ATTENTION, "seq_len": seq_len, "causal": True, "pass": pass_}


def test_a_long_attention_names_the_length_that_takes_less_than_a_minute(said):
    passes = ("forward", "backward", "end_to_end")
    line = said([[attention(65536, pass_) for pass_ in passes]])
    flops = 7 * (2 + 5 + 7) * 65536**2 * 64
    words = (
        f"about {4 * flops / 1e11 / 60:.0f} minutes or more on this CPU ({flops / 1e12:.1f} TFLOP)"
    )
    assert words in line
    shorter = int(re.search(r"Smaller: -p seq_len (\d+)$", line)[1])
    assert said([[attention(shorter, pass_) for pass_ in passes]]) == ""
    assert said([[attention(2 * shorter, pass_) for pass_ in passes]])


def test_a_length_that_only_python_makes_long_is_said(said):
    key = attention(8192, "end_to_end")
    assert said([[key]]) == ""
    assert "about a minute or more on this CPU (0.4 TFLOP)" in said(
        [[{**key, "implementation": "tiled", "heads": 2}]]
    )


def test_a_step_counts_once_for_all_its_phases_and_once_for_each_rank(said):
    step = {**STEP, "model": "xl25"}
    flops = step_flops(SIZES["xl25"], 4, 512)
    assert forecast.flops_of(step) == 3 * flops
    assert forecast.flops_of({**step, "warmup": 5}) == 8 * flops
    assert forecast.flops_of({**step, "world_size": 2}) == 6 * flops
    line = said([[{**step, "phase": name} for name in ("forward", "backward", "step")]])
    assert f"about {3 * flops / 1e11 / 60:.0f} minutes or more" in line
    assert line.endswith("Smaller: -p model tiny, or a smaller context or batch\n")


def test_what_is_short_or_unknown_or_a_gpus_is_not_spoken_of(said, monkeypatch):
    monkeypatch.setattr(forecast, "flops_per_s", None)
    for key in (attention(128), {**STEP, "model": "tiny"}, {"sort": "mine", "size": 10**9}):
        assert said([[key]]) == ""
    assert said([[{**STEP, "model": "10B"}]], "cuda") == ""


@pytest.mark.parametrize("load", [7.9, 8.6])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cpu_that_others_work_on_is_said(monkeypatch, capsys, load, device):
    monkeypatch.setattr(forecast.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(forecast.os, "cpu_count", lambda: 8)
    forecast.say_if_busy(device)
    is_said = capsys.readouterr().out.startswith("The machine is busy (load 9 on 8 cores)")
    assert is_said == (device == "cpu" and load > 8)


def test_a_length_of_time_has_its_unit():
    words = {65: "a minute", 130: "2 minutes", 5000: "83 minutes", 7300: "2 hours", 2e5: "2 days"}
    assert {seconds: forecast.in_words(seconds) for seconds in words} == words


def test_the_rate_is_that_of_products_here():
    assert 1e7 < forecast.flops_per_s(64) < 1e15
