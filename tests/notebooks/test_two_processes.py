"""Notebooks that measure in two processes, through papermill, each at its smallest size."""

import pytest
from notebook_texts import figures, rows

from a2lib.experiments.data_parallel.times import FEWEST
from a2lib.lab import bulk
from a2lib.theory import fsdp as theory
from a2lib.theory.latency import OPERATIONS
from a2lib.theory.transformer import TINY, parameter_count

PARAMETERS = parameter_count(TINY)
BY_GLOO = {"backend": "gloo", "world_size": 2, "status": "ok"}
WAYS = {("plain", "bucketed"), ("sharded", "bucketed"), ("plain", "torch_ddp"),
        ("zero", "torch_ddp")}  # fmt: skip


def test_collectives_stores_and_draws_each_operation(execute):
    notebook, measured = execute("collectives", operations=",".join(OPERATIONS))
    found = rows(measured, "collectives", **BY_GLOO, dtype="fp32", size=2**20, ms_queued="")
    assert [row["operation"] for row in found] == sorted(OPERATIONS)
    for row in found:
        columns = ("ms_rank_min", "ms_rank_median", "ms_rank_max", "ms_p80")
        times = [float(row[column]) for column in columns]
        assert times == sorted(times) and times[0] > 0
        assert row["conditions"].endswith("cores") and int(row["n"]) >= 5
    assert figures(notebook) == 1


def test_fsdp_stores_and_draws_steps_what_a_rank_holds_and_each_gather(execute):
    notebook, measured = execute("fsdp", context=8)
    what = {"model": "tiny", "context": 8, "precision": "fp32", "note": ""}
    found = {row["wrapper"]: row for row in rows(measured, "fsdp", **BY_GLOO, **what)}
    assert set(found) == {"fsdp", "fsdp2"}
    for row in found.values():
        assert int(row["n"]) >= FEWEST  # more, where the machine is not slow
        assert float(row["ms_without"]) > 0
    assert float(found["fsdp"]["ms_waited"]) > 0 and found["fsdp2"]["ms_waited"] == ""
    assert figures(notebook) == 1
    # What a rank holds is what the theory says to the byte, but for AdamW's counters of steps, 4
    # bytes a tensor; PyTorch's divides vectors too.
    found = rows(measured, "fsdp_memory", present_bytes="")
    found = {(r["wrapper"], r["step_number"], r["moment"]): r for r in found}
    parts = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer"}
    counters = 4 * (2 * 9 + 3)
    for held, moment in zip(theory.between(TINY, 2), ("init", "before", "after"), strict=True):
        for wrapper, own in (("fsdp", 1), ("fsdp2", 2 * PARAMETERS / theory.kept(TINY, 2))):
            for part, name in parts.items():
                extra = counters if part == "optimizer" and held.optimizer else 0
                size = int(found[wrapper, "0", moment][f"{part}_bytes"])
                assert size == pytest.approx(own * held.parts[name] + extra), (wrapper, part)
    # Whole models have two ranks' parameters and gradients; ZeRO-1's optimizer is half of DDP's.
    ddp, zero1 = (found[wrapper, "0", "after"] for wrapper in ("ddp", "zero1"))
    for part in ("parameter", "gradient"):
        assert ddp[f"{part}_bytes"] == zero1[f"{part}_bytes"] == str(4 * PARAMETERS)
    assert int(ddp["optimizer_bytes"]) == pytest.approx(8 * PARAMETERS + counters, abs=8)
    assert int(zero1["optimizer_bytes"]) < 0.6 * int(ddp["optimizer_bytes"])
    forward = found["fsdp", "3", "forward"]
    last = [m for m in theory.step(TINY, 2, 0, computes=4) if m.moment == "backward root"][0]
    assert int(forward["whole_bytes"]) == last.gathered
    # Without activations, which a CPU does not tell, and when a unit begins.
    moments = [m for m in theory.step(TINY, 2, 0, computes=4) if m.moment[:4] in ("forw", "back")]
    fullest = max(moments, key=lambda m: m.total)
    peak = found["fsdp", "3", "peak"]
    held = sum(int(peak[f"{part}_bytes"]) for part in (*parts, "whole", "travelling"))
    assert held >= fullest.total + counters
    # Each gather has its turn.
    data = measured.parent
    assert bulk.pictures("gathers", data) == [("cpu", "fsdp-tiny-launched-2-ranks")]
    found = bulk.read("gathers", "cpu", "fsdp-tiny-launched-2-ranks", data)
    gathered = [("forward", unit) for unit in ("root", "layers.0", "layers.1")]
    gathered.append(("backward", "layers.0"))
    assert [(row["pass"], row["unit"]) for row in found.rows] == gathered
    for row in found.rows:
        # The CPU gathers before it goes on.
        times = [row[f"{c}_ms"] for c in ("gather_start", "gather_end", "turn", "compute_start")]
        assert times == sorted(times) and row["compute_end_ms"] > times[-1]
    assert bulk.pictures("strip", data) == [("cpu", "fsdp-tiny-2-ranks")]


def test_sharded_optimizer_stores_times_memory_of_every_rank_and_the_bytes_that_travel(execute):
    notebook, measured = execute("sharded_optimizer", context=8)
    what = {"model": "tiny", "context": 8, "note": "", "ms_host": ""}
    found = rows(measured, "sharded_optimizer", **BY_GLOO, **what)
    assert {(row["optimizer"], row["wrapper"]) for row in found} == WAYS
    for row in found:
        assert int(row["n"]) >= FEWEST
        assert all(float(row[c]) > 0 for c in ("ms", "ms_without", "ms_optimizer"))
    found = rows(measured, "sharded_optimizer_memory", status="ok", note="")
    found = {(r["optimizer"], r["wrapper"], r["moment"], int(r["on_rank"])): r for r in found}
    assert len(found) == len(WAYS) * 4 * 2
    for way in WAYS:
        states = [int(found[*way, "after", rank]["optimizer_bytes"]) for rank in (0, 1)]
        params = int(found[*way, "init", 0]["parameter_bytes"])
        assert found[*way, "init", 0]["optimizer_bytes"] == "0"
        assert int(found[*way, "before", 1]["gradient_bytes"]) == params
        # Two moments, and a counter of four bytes for each of 21 tensors.
        whole = 2 * params + 4 * 21
        if way[0] == "plain":
            assert states == [whole, whole]
        else:
            assert sum(states) == whole and max(states) < 0.51 * whole
        step = found[*way, "step", 0]
        assert int(step["reduced_bytes"]) == pytest.approx(params, rel=0.01)
        exchanged = int(step["gathered_bytes"]) + int(step["broadcast_bytes"])
        # PyTorch's wrapper broadcasts buffers as well.
        least = 0 if way[0] == "plain" else params
        assert least <= exchanged <= 1.02 * least + 1024
    assert figures(notebook) == 1
