"""The benchmarking script: what it prints, what it refuses, how it ends."""

import json

import pytest
import torch
from programs import printed
from refusals import refused_command

from a2lib import benchmark
from a2lib.lab.steps import PHASES

TINY = "--size tiny --context 8 --batch 2 --warmup 1 --steps 2".split()


@pytest.mark.parametrize("mode", PHASES)
def test_a_table_and_the_same_as_json(mode, capsys):
    assert benchmark.main([*TINY, f"--mode={mode}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [*PHASES[mode], "step", "wall"]
    for line, name in zip(lines[1:], ["ms", *rows, "ok"], strict=True):
        assert line.split()[0] == name
    assert benchmark.main([*TINY, f"--mode={mode}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], len(said["warmup"]), len(said["steps"])) == ("ok", 1, 2)
    assert list(said["steps"][0]["ms"]) == rows


def test_hyperparameters_replace_those_of_the_size(capsys):
    _, config = benchmark.parse([*TINY, "--d-model=8", "--num-layers=1"])
    assert (config.shape.d_model, config.shape.num_layers, config.shape.d_ff) == (8, 1, 64)


def test_out_of_memory_is_a_result(capsys, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    assert benchmark.main([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "oom"


REFUSED = {
    "--size=xl": "'xl' is xl25 in the 2025 handout, 2.7B in that of 2026",
    "--d-model=9": "num_heads 2 does not divide d_model 9",
    "--checkpointing=segments:3": "allowed as k are 1 to 2",
    "--contxt=8": "unrecognized arguments: --contxt=8",
    "--context=0": "context is 0; allowed are positive integers",
    "--nvtx=all": "choose from",
    "--size=10B": "a step takes 205 GB at least; allowed is what fits",
}
NEEDS_A_GPU = ("--capture",)


@pytest.mark.parametrize("option", [*REFUSED, *NEEDS_A_GPU])
def test_what_cannot_be_is_one_line(option, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "device_kind", lambda: "cpu")
    monkeypatch.setattr(benchmark, "available_bytes", lambda: 10**10)
    said = refused_command(benchmark.parse, [*TINY, option], capsys)
    assert REFUSED.get(option, "need a GPU; leave them out here") in said


def test_help_needs_no_torch(python):
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['--help'];"
    code += "runpy.run_module('a2lib.benchmark', run_name='__main__', alter_sys=True)"
    assert "--checkpointing" in printed(python(code))
