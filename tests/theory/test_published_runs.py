"""Trainings that others published, by the planner: data/reference/trainings.csv."""

from dataclasses import replace

import committed
import pytest
from refusals import refused

from a2lib.theory.published import training
from a2lib.theory.transformer import parameter_count

ROWS = {row["run"]: row for row in committed.reference("trainings")}
RUNS = {name: training(row) for name, row in ROWS.items()}
META = [name for name in RUNS if name.startswith("Llama 3")]

# By their publishers: billions of parameters (MPT's of llm-foundry's table have positions and
# biases beside these), and utilisations of the peak in per cent, each by its own convention: whole
# scores in Korthikanti et al. (GPTs) and MPT, half of them in DeepSeek-V3's; Meta does not say.
PRINTED = {
    "Llama 3 405B, 8,192 GPUs": (405.9, 43), "Llama 3 405B, 16,384 GPUs": (405.9, 41),
    "Llama 3 405B, 131,072 tokens": (405.9, 38), "DeepSeek-V3": (671.0, 38.94),
    "GPT 1T": (1008.0, 56.3), "GPT 530B": (529.6, 56.0), "GPT-3 175B": (174.6, 51.4),
    "GPT 22B": (22.0, 41.5), "MPT 70B": (64.86, 42.57), "MPT 30B": (29.98, 43.92),
    "MPT 13B": (12.85, 39.86), "MPT 7B": (6.659, 46.44),
}  # fmt: skip


def test_the_sizes_and_speeds_are_those_that_were_printed():
    assert set(PRINTED) == set(RUNS)
    for name, (billions, percent) in PRINTED.items():
        one = RUNS[name]
        assert parameter_count(one.job.shape) / 1e9 == pytest.approx(billions, rel=3e-3)
        # Our count is at most theirs: half of the scores, no positions.
        found = 100 * one.share(one.step_s)
        assert percent * 0.95 < found < percent * 1.02, (name, found)
    # 272.8 billion tokens a day, as the same table has it
    deepseek = RUNS["DeepSeek-V3"]
    a_day = deepseek.job.batch * deepseek.job.context * 86_400 / deepseek.step_s
    assert a_day == pytest.approx(272.80e9, rel=1e-3)


def test_published_layouts_fit_but_where_more_is_recomputed_than_the_planner_knows():
    over = {name for name, one in RUNS.items() if one.plan.memory_bytes > one.job.device.memory}
    assert over == {"DeepSeek-V3", "Llama 3 405B, 8,192 GPUs"}
    meta = RUNS["Llama 3 405B, 8,192 GPUs"]
    assert meta.plan.memory_bytes < 1.06 * meta.job.device.memory
    # a pipeline of 16 of 32 micro-batches holds 18; of 16 it held all 16
    assert replace(meta.layout, microbatches=16, data=128) == RUNS[META[1]].layout


def test_published_steps_are_near_the_planners():
    """Within its two ends, or slower by what is elementwise, or quicker as products are quicker
    than 65 % of the A100's peak."""
    ratio = {name: one.step_s / one.plan.expected_s for name, one in RUNS.items()}
    ends = {name: (one.plan.step_s, one.plan.serial_s) for name, one in RUNS.items()}
    inside = {name for name, (least, most) in ends.items() if least <= RUNS[name].step_s <= most}
    assert inside == {*META, "DeepSeek-V3", "GPT 530B"}
    assert all(1.15 < ratio[name] < 1.25 for name in META)
    slower = {name for name in set(RUNS) - inside if ratio[name] > 1}
    assert set(RUNS) - inside - slower == {"GPT 1T"} and ratio["GPT 1T"] > 0.9
    assert all(ratio[name] < 1.25 for name in slower - {"MPT 7B", "MPT 13B"})
    assert ratio["MPT 7B"] < 1.5 and ratio["MPT 13B"] < 1.7
    # a schedule that hides the experts' messages takes less than one that waits for them
    assert ratio["DeepSeek-V3"] < 0.8


def test_another_unit_is_refused():
    row = ROWS["MPT 7B"] | {"unit": "ms"}
    refused("unit 'ms': allowed are s, TFLOP/s, tokens/s a device", training, row)
