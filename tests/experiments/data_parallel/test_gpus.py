"""Rows of two GPUs, of every way, launched and captured. Those of two processes on the CPU are the
notebooks' tests'."""

import dataclasses

import pytest

from a2lib.experiments import fsdp, sharded_optimizer
from a2lib.experiments.data_parallel.configurations import Setting, Way, tasks
from a2lib.experiments.harness.ranks import Ranks
from a2lib.lab import FSDP, FSDP_MEMORY, SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY, bulk
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.sharding import Held
from a2lib.theory.transformer import Shape

LAUNCHED = Setting("tiny", 8, 2, precision="bf16", ranks=Ranks(2, "nccl"))
CAPTURED = dataclasses.replace(LAUNCHED, capture=True)
SHAPE = Shape(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=128)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]


def test_rows_of_the_sharded_optimizer_and_its_memory_by_the_formula(measured):
    ways = [way for pair in sharded_optimizer.WAYS.values() for way in pair]
    asked = {CAPTURED: ways[:4], LAUNCHED: ways}
    rows = measured(SHARDED_OPTIMIZER, tasks(SHARDED_OPTIMIZER, asked))
    assert all(float(row["ms_optimizer"]) > 0 for row in rows)
    rows = measured(SHARDED_OPTIMIZER_MEMORY, sharded_optimizer.memory_tasks({LAUNCHED: ways}))
    for row in rows:
        assert int(row["present_bytes"]) > int(row["parameter_bytes"])
        if row["moment"] == "after":
            counted = Held(StepMemory(SHAPE, 2, 8), 2, row["optimizer"] != "plain").state()
            assert int(row["optimizer_bytes"]) in counted, row
        # Backward runs in a thread of its own, whose calls are to be counted too.
        if row["moment"] == "step" and row["carrier"] == "backend":
            assert int(row["reduced_bytes"]) >= int(row["parameter_bytes"]), row
            gathered = int(row["gathered_bytes"]) + int(row["broadcast_bytes"])
            assert (gathered >= int(row["parameter_bytes"])) is (row["optimizer"] != "plain"), row


def test_rows_of_fsdp_with_its_gathers_and_timeline(measured, tmp_path):
    asked = {CAPTURED: [Way("fsdp")], LAUNCHED: [Way("fsdp"), Way("fsdp2")]}
    memory = measured(FSDP_MEMORY, fsdp.memory_tasks(asked))
    held = {(row["wrapper"], row["step_number"], row["moment"]): row for row in memory}
    for wrapper in ("fsdp", "fsdp2", "ddp", "zero1"):
        after = held[wrapper, "3", "after"]
        parts = ("parameter", "gradient", "optimizer")
        known = sum(int(after[f"{part}_bytes"]) for part in parts)
        peak = int(held[wrapper, "3", "peak"]["tensor_bytes"])
        assert peak >= int(after["present_bytes"]) >= known
    rows = measured(FSDP, tasks(FSDP, asked))
    assert all(float(row["ms_host"]) > 0 for row in rows)
    names = [f"fsdp-tiny-{way}-2-ranks" for way in ("captured", "launched")]
    assert sorted(name for _, name in bulk.pictures("gathers", tmp_path)) == names
    for name in names:
        rows = bulk.read("gathers", "nvidia", name, tmp_path).rows
        gathered = [("forward", unit) for unit in ("root", "layers.0", "layers.1")]
        gathered.append(("backward", "layers.0"))
        assert [(row["pass"], row["unit"]) for row in rows] == gathered
        assert all(row["waited_ms"] >= 0 for row in rows)
        ends = [row["compute_end_ms"] for row in rows]
        assert ends == sorted(ends) and ends[0] > 0
    strip = bulk.read("strip", "nvidia", "fsdp-tiny-2-ranks", tmp_path).rows
    assert "communication" in {row["kind"] for row in strip}
