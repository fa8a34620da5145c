"""Traces and snapshots of a GPU: what the readers say against what CUDA and PyTorch count."""

import collections
import shutil
import sys

import pytest
import torch
from notebook_cells import load_cells

from a2lib.lab import snapshot, trace
from a2lib.lab.ranges import annotate
from a2lib.lab.steps import StepConfig, TrainingStep, timed
from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import Shape
from a2lib.theory.transformer import parameter_count

pytestmark = pytest.mark.gpu
IN_A_BLOCK = "attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3".split()


def check(traced):
    """Assert what holds of a trace of two steps of two blocks, whoever recorded it."""
    cells = load_cells("profile")
    assert list(traced.steps()) == ["step 0", "step 1"]
    unfiled = cells.unfiled_percent(traced.kernels)
    assert unfiled["no_launch_percent"] == 0 and unfiled["no_class_percent"] < 1, unfiled
    # After each step, outside of its range and its clock, the host reads the loss.
    outside = [kernel.name for kernel in traced.kernels if not kernel.path]
    assert len(outside) == 2 and "DtoH" in outside[0] and "DtoH" in outside[1], outside
    linears = {"lm_head"}
    for name in IN_A_BLOCK:
        linears |= {f"layers.0.{name}", f"layers.1.{name}"}
    for kernels in traced.steps().values():
        # cuBLAS may take several kernels for a product, and some to sum its parts.
        launched, phases = collections.Counter(), collections.Counter()
        for kernel in kernels:
            if kernel.kind == "matmul":
                launched[kernel.path[-1]] += 1
                phases[kernel.phase] += 1
        assert launched.keys() >= linears, launched
        assert phases["backward"] >= 2 * len(linears), launched
    for phases in cells.phase_times(traced).values():
        assert set(phases) == {*trace.PHASES, "step"}
        for times in phases.values():
            assert 0 < times["ms_busy"] <= times["ms"] and times["us_queued"] >= 0


def test_a_trace_by_torch_profiler():
    config = StepConfig(model=Shape(768, 3072, 2, 12), context=128, batch=2)
    step, within = TrainingStep(config, "cuda"), torch.profiler.record_function
    annotate(step.model, within)
    timed(step)
    with torch.profiler.profile() as profiler:
        for number in range(2):
            names = {"step": f"step {number}"}
            timed(step, lambda name, names=names: within(names.get(name, name)))
    traced = trace.from_profiler(profiler)
    assert traced.source == "torch"
    check(traced)


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems")
def test_a_trace_by_nsight_systems(tmp_path):
    options = "--num-layers=2 --context=128 --batch=2 --warmup=2 --steps=2 --nvtx=modules --json"
    command = [sys.executable, "-m", "a2lib.benchmark", *options.split()]
    traced, printed = load_cells("profile").under_nsys(command, tmp_path / "report")
    assert '"status": "ok"' in printed
    check(traced)


def test_the_recorded_peak_is_the_allocators():
    with snapshot.Recorder() as recorder:
        model = TransformerLM(101, 64, 64, 2, 2, 128, device="cuda", seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        recorder.watch(model, optimizer)
        tokens, targets = torch.randint(101, (2, 2, 64), device="cuda")
        for i in range(2):
            torch.cuda.reset_peak_memory_stats()
            with recorder.phase(f"step {i}"):
                with recorder.phase("forward"):
                    loss = cross_entropy(model(tokens), targets)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
        want = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    found = recorder.recording
    assert found.unexplained_bytes == 0
    assert sum(snapshot.peak(found, "step 1").values()) == want

    def held(phase, category):
        return snapshot.peak(found, f"step 1/{phase}")[category]

    weights = 4 * parameter_count(model.shape)
    tables = sum(x.nbytes for x in model.buffers())
    assert held("optimizer", "parameters") == weights + tables
    assert held("optimizer", "gradients") == weights
    assert held("forward", "saved for backward") > 0
