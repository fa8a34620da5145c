"""The benchmark on a GPU: events, memory, precision, ranges, and the allocation history."""

import json
import pickle

import pytest
import torch

from a2lib.benchmark import MODES, Config, run
from a2lib.benchmark.__main__ import main
from a2lib.theory.transformer import parameter_count

pytestmark = pytest.mark.gpu
SMALL = {"num_layers": 2, "context": 128, "batch": 2, "warmup": 2, "steps": 3, "device": "cuda"}


@pytest.mark.parametrize("sync", ["step", "phase"])
@pytest.mark.parametrize("mode", MODES)
def test_two_clocks_and_memory(mode, sync):
    result = run(Config(**SMALL, mode=mode, sync=sync))
    assert result.status == "ok"
    for step in result.steps:
        assert 0 < sum(step.ms.values()) <= step.total_ms * 1.01
        assert step.total_ms <= step.wall_ms * 1.01
        assert 0 < step.allocated_bytes <= step.reserved_bytes
    memory, weights = result.memory, 4 * parameter_count(result.config.shape)
    states = 3 if mode == "train-step" else 1
    assert states * weights <= memory["before_bytes"] <= memory["peak_allocated_bytes"]
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] < memory["total_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "tf32"},
        {"precision": "bf16"},
        {"precision": "bf16", "attention": "flash"},
        {"precision": "bf16", "attention": "sdpa_flash"},
        {"precision": "bf16", "attention": "sdpa_cudnn"},
        {"precision": "bf16", "attention": "sdpa_efficient"},
        {"precision": "bf16", "attention": "flex"},
        {"precision": "bf16", "compile": True},
        {"precision": "bf16", "checkpointing": "block", "autocast_cache": False},
        {"nvtx": "phases"},
        {"nvtx": "modules"},
        {"nvtx": "modules", "cuda_profiler": True},
    ],
    ids=str,
)
def test_every_option_trains_alike(options):
    plain, other = (run(Config(**SMALL, **given)) for given in ({}, options))
    assert other.status == "ok", other.note
    for want, found in zip(plain.steps, other.steps, strict=True):
        assert found.loss == pytest.approx(want.loss, rel=0.02)


def test_out_of_memory_gives_the_memory_back():
    before = torch.cuda.memory_allocated()
    result = run(Config(**{**SMALL, "batch": 2**15, "context": 4096}))
    assert result.status == "oom" and "forward" in result.note
    assert torch.cuda.memory_allocated() <= before + 2**27  # cuBLAS may keep a workspace
    assert run(Config(**SMALL)).status == "ok"


def test_allocation_history(tmp_path, capsys):
    path = tmp_path / "memory.pickle"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main([*options, "--json", f"--memory-history={path}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["cuda"] and "peak_allocated_bytes" in found["memory"]
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    actions = {event["action"] for trace in snapshot["device_traces"] for event in trace}
    assert {"alloc", "free_completed"} <= actions
