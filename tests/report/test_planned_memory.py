"""The planner's memory beside measured peaks, as "Paper beside hardware" shows it."""

import pytest

from a2lib.report.chapters.parallelism_measured import Beside, planned
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.transformer import SIZES

TIMED = {"ms": 1, "ms_p20": 1, "ms_p80": 1, "n": 9}


def test_the_planner_is_within_five_percent_of_every_measured_peak():
    """The rows of this checkout; what a plan has not is left out."""
    found = planned.peaks(Beside())
    assert set(found["section"]) <= {"benchmark", "memory", "checkpointing"} and len(found) > 40
    assert {"fp32", "tf32", "bf16"} == set(found["precision"])
    off = found[found["off"].abs() > planned.PROMISED]
    assert off.empty, off.to_string()


def test_the_planners_memory_beside_peaks_made_by_hand(synthetic, tmp_path):
    def made(**sections):
        return Beside([synthetic.by_hand(tmp_path, **sections)])

    assert "Not measured yet" in str(planned.sentence(Beside([tmp_path])))
    one = Job(SIZES["small"], DEVICES["H200"], 1, 4, 512, 0.0, "fp32", "eager")
    whole = evaluate(one, Layout(sharding="none"))
    again = evaluate(one, Layout(sharding="none", checkpointing="block"))
    key = {"model": "small", "context": 512, "batch": 4, "precision": "fp32", "attention": "eager"}
    step = {**key, "mode": "train-step", "phase": "step", "compile": "none", "warmup": 5,
            "capture": "false", **TIMED, "peak_bytes": round(whole.memory_bytes / 1.1)}  # fmt: skip
    held = {**key, **TIMED, "layers": 12, "strategy": "block", "gradients": "fresh"}
    held |= {"held_bytes": 0, "peak_bytes": round(again.memory_bytes - one.device.workspace)}
    steps = [{**key, "mode": "train-step", "phase": "step", "step_number": k,
              "allocated_bytes": round(whole.memory_bytes / (0.98 if k else 3))}
             for k in (0, 1)]  # fmt: skip
    p = made(benchmark=[step, {**step, "precision": "bf16_weights"},
                        {**step, "compile": "blocks"}],
             checkpointing=[held, {**held, "strategy": "half"}], memory=steps)  # fmt: skip
    found = planned.peaks(p)
    assert found["off"].tolist() == pytest.approx([0.1, -0.02, 0])
    said = str(planned.sentence(p))
    assert said.startswith(
        "Its memory is −2% to +10% off the measured peaks of 3 training steps, 0% in the middle; "
        "2 are within 5%. The furthest is small at 512 tokens in fp32 with eager attention, of "
    )
    assert len(planned.table(p, "c", "tab-c").frame) == 3
    # A process that has captured a step keeps as many workspaces again.
    after = {**step, "peak_bytes": round(whole.memory_bytes + one.device.workspace)}
    p = made(benchmark=[after, {**after, "capture": "true"}])
    assert planned.peaks(p)["off"].tolist()[0] == pytest.approx(0, abs=1e-6)
