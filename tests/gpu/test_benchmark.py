"""The benchmark on a GPU: events, memory, precision, ranges, and the allocation history."""

import json
import pickle

import pytest
import torch

from a2lib.benchmark import MODES, Config, run, workload
from a2lib.benchmark.__main__ import main
from a2lib.theory.transformer import parameter_count

pytestmark = pytest.mark.gpu
SMALL = {"num_layers": 2, "context": 128, "batch": 2, "warmup": 2, "steps": 3, "device": "cuda"}


@pytest.mark.parametrize("mode", MODES)
def test_two_clocks_and_memory(mode):
    result = run(Config(**SMALL, mode=mode))
    assert result.status == "ok"
    for step in result.steps:
        assert 0 < sum(step.ms.values()) <= step.total_ms * 1.01
        assert step.total_ms <= step.wall_ms * 1.01
        assert 0 < step.allocated_bytes <= step.reserved_bytes
    memory, weights = result.memory, 4 * parameter_count(result.config.shape)
    states = 3 if mode == "train-step" else 1
    assert states * weights <= memory["before_bytes"] <= memory["peak_allocated_bytes"]
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] < memory["total_bytes"]


BF16, FLASH = {"precision": "bf16"}, {"precision": "bf16", "attention": "flash"}
NAMES = "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"
PEERS = [{**BF16, "attention": name} for name in NAMES]


@pytest.mark.parametrize("options", [
    {"precision": "tf32"}, BF16, FLASH, *PEERS,
    {**BF16, "compile": True},
    {**FLASH, "compile_blocks": True},
    {**BF16, "checkpointing": "block", "autocast_cache": False},
    {"precision": "bf16_weights"},
    {"mode": "overlapped-step"},
    {"precision": "bf16_weights", "mode": "overlapped-step", "compile_blocks": True},
    {"nvtx": "phases"}, {"nvtx": "modules"}, {"nvtx": "modules", "cuda_profiler": True},
], ids=str)  # fmt: skip
def test_every_option_trains_alike(options):
    plain, other = (run(Config(**SMALL, **given)) for given in ({}, options))
    assert other.status == "ok", other.note
    for want, found in zip(plain.steps, other.steps, strict=True):
        assert found.loss == pytest.approx(want.loss, rel=0.02)


# Where a sum may be taken in another order: atomics of a peer's backward, Inductor's scatter into
# the gradient of the embedding. After five steps of AdamW.
REORDERED = 2e-3


@pytest.mark.parametrize("options, tolerance", [
    *(({"mode": mode}, 0) for mode in ("train-step", "forward-backward", "inference", "forward")),
    ({"precision": "tf32"}, 0),
    ({"precision": "tf32", "mode": "forward"}, 0),
    *(({**BF16, "mode": mode}, 0) for mode in ("train-step", "forward", "forward-backward")),
    (FLASH, 0),
    ({**FLASH, "checkpointing": "block"}, 0),
    *((peer, REORDERED) for peer in PEERS),
    ({**FLASH, "compile": True}, REORDERED),
    ({**FLASH, "compile_blocks": True}, REORDERED),
    ({**FLASH, "compile_blocks": True, "mode": "forward"}, 0),
    ({"compile": True}, REORDERED),
], ids=str)  # fmt: skip
def test_captured_steps_have_the_losses_of_plain_ones(options, tolerance):
    plain, captured = (run(Config(**SMALL, **options, capture=on)) for on in (False, True))
    assert (plain.status, captured.status) == ("ok", "ok"), captured.note
    want, found = ([s.loss for s in r.warmup + r.steps] for r in (plain, captured))
    if "loss" in plain.config.phases:
        assert found == pytest.approx(want, rel=tolerance, abs=0)
        trains = "optimizer" in plain.config.phases
        assert (found[0] > found[-1]) == trains
    for step in captured.steps:
        assert step.ms == {} and 0 < step.total_ms <= step.wall_ms * 1.01


def test_a_captured_run_gives_its_memory_back(no_garbage):
    run(Config(**SMALL, capture=True))  # cuBLAS keeps a workspace, the capture a random state
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    result = run(Config(**SMALL, capture=True))
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    plain = run(Config(**SMALL))
    peaks = [r.memory["peak_allocated_bytes"] for r in (plain, result)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_a_step_that_cannot_be_captured_is_a_result(monkeypatch):
    """It reads a value, for which a capture cannot wait."""
    plain = workload.cross_entropy
    monkeypatch.setattr(
        workload, "cross_entropy", lambda *x: plain(*x) * (1 if x[0].sum().item() else 1)
    )
    result = run(Config(**SMALL, capture=True))
    assert (result.status, len(result.warmup), result.steps) == ("unsupported", 1, [])
    assert "no CUDA graph of this step" in result.note
    monkeypatch.undo()
    assert run(Config(**SMALL, capture=True)).status == "ok"


def test_out_of_memory_gives_the_memory_back(no_garbage):
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
