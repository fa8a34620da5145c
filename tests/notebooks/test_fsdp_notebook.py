"""notebooks/fsdp.ipynb through papermill, with two processes: ours and PyTorch's."""

import pytest
from notebook_texts import figures, rows

from a2lib.experiments.data_parallel.times import FEWEST
from a2lib.measure import bulk
from a2lib.theory import fsdp as theory
from a2lib.theory.transformer import TINY, parameter_count

PARAMETERS = parameter_count(TINY)


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("fsdp", "-p", "context", "8")


def test_steps_are_stored_and_drawn(executed):
    notebook, measured = executed
    found = {row["wrapper"]: row for row in rows(measured, "fsdp")}
    assert set(found) == {"fsdp", "fsdp2"}
    for row in found.values():
        columns = ("model", "context", "precision", "backend", "world_size", "status", "note")
        assert [row[c] for c in columns] == ["tiny", "8", "fp32", "gloo", "2", "ok", ""], row
        assert int(row["n"]) >= FEWEST  # more, where the machine is not slow
        assert float(row["ms_without"]) > 0
    assert float(found["fsdp"]["ms_waited"]) > 0 and found["fsdp2"]["ms_waited"] == ""
    assert figures(notebook) == 1


def test_what_a_rank_holds_is_what_the_theory_says(executed):
    """To the byte, but for AdamW's counters of steps, 4 bytes a tensor; PyTorch's divides vectors
    too."""
    found = {
        (r["wrapper"], r["step_number"], r["moment"]): r for r in rows(executed[1], "fsdp_memory")
    }
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
    assert {row["present_bytes"] for row in found.values()} == {""}


def test_each_gather_has_its_turn(executed):
    data = executed[1].parent
    assert bulk.pictures("gathers", data) == [("cpu", "fsdp-tiny-launched-2-ranks")]
    found = bulk.read("gathers", "cpu", "fsdp-tiny-launched-2-ranks", data)
    assert [(row["pass"], row["unit"]) for row in found.rows] == [
        ("forward", "root"), ("forward", "layers.0"), ("forward", "layers.1"),
        ("backward", "layers.0"),
    ]  # fmt: skip
    for row in found.rows:
        # The CPU gathers before it goes on.
        times = [row[f"{c}_ms"] for c in ("gather_start", "gather_end", "turn", "compute_start")]
        assert times == sorted(times) and row["compute_end_ms"] > times[-1]
        assert row["slack_ms"] == pytest.approx(times[2] - times[1], rel=1e-3, abs=1e-4)
    assert bulk.pictures("strip", data) == [("cpu", "fsdp-tiny-2-ranks")]
