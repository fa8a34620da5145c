"""Traces and snapshots of a GPU: what the readers say against what CUDA and PyTorch count."""

import collections
import itertools

import pytest
import torch

from a2lib.benchmark import Config, run
from a2lib.experiments.profile.handlers import command
from a2lib.lab import nsight, snapshot, trace
from a2lib.lab.saved import saved_for_backward
from a2lib.model import RotaryPositionalEmbedding, TransformerBlock, TransformerLM, cross_entropy
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.transformer import Shape, state_bytes

pytestmark = pytest.mark.gpu
SMALL = {"num_layers": 2, "context": 128, "batch": 2, "warmup": 2, "steps": 2, "device": "cuda"}

IN_A_BLOCK = [f"attn.{name}_proj" for name in ("q", "k", "v", "output")] + [
    f"ffn.w{i}" for i in (1, 2, 3)
]


def check(found):
    """What must hold of a trace of SMALL, whoever wrote it."""
    assert list(found.steps()) == ["step 0", "step 1"]
    said = trace.coverage(found.kernels)
    assert said.no_launch == 0, said
    # After each step, outside of its range and its clock, the host reads the loss.
    outside = [k.name for k in found.kernels if not k.path]
    assert len(outside) == SMALL["steps"] and all("DtoH" in name for name in outside), outside
    assert said.no_class < 0.01, said.unknown
    linears = {f"layers.{i}.{name}" for i in range(2) for name in IN_A_BLOCK} | {"lm_head"}
    for kernels in found.steps().values():
        # cuBLAS may take several kernels for a product, and some to sum its parts.
        here = [k for k in kernels if k.kind == "matmul"]
        launched = collections.Counter(k.range for k in here)
        assert all(launched[name] >= 1 for name in linears), launched
        assert all(launched[f"{name}.bwd"] >= 2 for name in linears), launched
        in_backward = [k for k in here if k.phase == "backward"]
        assert all(k.range.endswith(".bwd") for k in in_backward)


def test_a_trace_by_torch_profiler(tmp_path):
    path = tmp_path / "trace.json.gz"
    run(Config(**SMALL, nvtx="modules", torch_profile=str(path)))
    found = trace.read(path)
    assert found.source == "chrome"
    check(found)


@pytest.mark.skipif(nsight.find() is None, reason="needs Nsight Systems")
def test_a_trace_by_nsight_systems(tmp_path):
    config = Config(**SMALL, nvtx="modules", cuda_profiler=True)
    path, printed = nsight.record(command(config), tmp_path / "report", timeout_s=300)
    assert '"status": "ok"' in printed
    found = trace.read(path)
    assert found.source == "nsys" and found.waits
    check(found)


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
    assert snapshot.peak(found, "step 1").total == want

    def held(phase, category):
        alive = snapshot.peak(found, f"step 1/{phase}").alive
        return sum(one.bytes for one in alive if one.category == category)

    state = state_bytes(model.shape)
    tables = sum(x.nbytes for x in model.buffers())
    assert held("optimizer", "parameters") == state.parameters + tables
    assert held("optimizer", "gradients") == state.gradients
    assert held("forward", "saved for backward") > 0


@pytest.mark.parametrize(("attention", "precision"), [
    *itertools.product(("eager", "flash"), ("fp32", "bf16")),
    ("sdpa_flash", "bf16"),  # it has no float32
])  # fmt: skip
def test_what_a_block_keeps_is_what_the_formula_says(attention, precision):
    shape, batch, context = Shape(128, 256, 1, 2), 2, 128
    rope = RotaryPositionalEmbedding(1e4, shape.head_dim, context, device="cuda")
    block = TransformerBlock(128, 2, 256, rope, attention, device="cuda")
    x = torch.randn(batch, context, 128, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        _, saved = saved_for_backward(block, x)
    want = block_saved_bytes(shape, batch, context, attention, precision)
    assert sum(one.bytes for one in saved) == want, [(one.operations, one.bytes) for one in saved]
