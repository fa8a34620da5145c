"""Trainings that others published, by the evaluator: data/reference/trainings.csv."""

from dataclasses import replace

import committed
import pytest
from refusals import refused

from a2lib.theory.published import published_run
from a2lib.theory.transformer import parameter_count

ROWS = committed.reference("trainings")
RUNS = {row["run"]: published_run(row) for row in ROWS if row["expert"] == "1"}

# By their publishers: billions of parameters (MPT's of llm-foundry's table have positions and
# biases beside these), and utilisations of the peak in per cent, each by its own convention: whole
# scores in Korthikanti et al. (GPTs) and MPT; Meta does not say.
PRINTED = {
    "Llama 3 405B, 8,192 GPUs": (405.9, 43), "Llama 3 405B, 16,384 GPUs": (405.9, 41),
    "Llama 3 405B, 131,072 tokens": (405.9, 38),
    "GPT 1T": (1008.0, 56.3), "GPT 530B": (529.6, 56.0), "GPT-3 175B": (174.6, 51.4),
    "GPT 22B": (22.0, 41.5), "MPT 70B": (64.86, 42.57), "MPT 30B": (29.98, 43.92),
    "MPT 13B": (12.85, 39.86), "MPT 7B": (6.659, 46.44),
}  # fmt: skip


# Whose publishers count all scores.
FULL = ("MPT 70B", "MPT 30B", "MPT 13B", "MPT 7B", "GPT 1T", "GPT 530B", "GPT-3 175B", "GPT 22B")


def test_the_sizes_and_speeds_are_those_that_were_printed():
    assert set(PRINTED) == set(RUNS)
    for name, (billions, percent) in PRINTED.items():
        run = RUNS[name]
        assert parameter_count(run.training.shape) / 1e9 == pytest.approx(billions, rel=3e-3)
        # Our count is at most theirs: half of the scores, no positions.
        found = 100 * run.share(run.seconds())
        assert percent * 0.95 < found < percent * 1.02, (name, found)
        if name in FULL:
            full = 100 * run.share(run.seconds(), "full")
            assert full == pytest.approx(percent, rel=0.02), name


def test_published_layouts_fit_but_where_less_is_kept_than_is_counted():
    for name, run in RUNS.items():
        full = run.estimate.memory_bytes / run.device.memory
        assert 1 < full < 1.06 if name == "Llama 3 405B, 8,192 GPUs" else full <= 1, name
    # a pipeline of 16 of 32 micro-batches holds 18; of 16 it held all 16
    layout = replace(RUNS["Llama 3 405B, 8,192 GPUs"].layout, microbatches=16, data=128)
    assert layout == RUNS["Llama 3 405B, 16,384 GPUs"].layout


@pytest.mark.parametrize("name", RUNS)
def test_published_steps_are_near_what_is_expected(name):
    """Nine of eleven within a fifth: the two smallest models by FSDP are slower."""
    run = RUNS[name]
    low, high = (1.2, 1.35) if name in ("MPT 7B", "MPT 13B") else (1 / 1.2, 1.2)
    assert low < run.ratio() < high
    # Whose messages weigh; of others some steps are slower than if nothing had been hidden.
    if name.startswith("Llama 3") or name == "GPT 530B":
        time = run.estimate.time
        assert time.all_hidden_s <= run.seconds() <= time.none_hidden_s


def test_published_gradients_are_sent_as_their_sources_say():
    """Meta reduce-scatters in fp32, MPT by FSDP's "pure" precision; the GPTs have one data rank."""
    for name, run in RUNS.items():
        family = name.split()[0]
        assert run.training.sent_gradients == {"Llama": "fp32", "MPT": "bf16"}.get(family)
        assert family in ("Llama", "MPT") or run.layout.data == 1
    # in bf16 Meta's steps would be as long as the estimate; in fp32 they are shorter
    for name in ("Llama 3 405B, 8,192 GPUs", "Llama 3 405B, 16,384 GPUs"):
        run = RUNS[name]
        narrow = replace(run, training=replace(run.training, sent_gradients="bf16"))
        assert 0.84 < run.ratio() < 0.88 and 1 < narrow.ratio() < 1.04


def test_a_model_with_experts_is_refused():
    [row] = [row for row in ROWS if row["run"] not in RUNS]
    refused("DeepSeek-V3 has experts; allowed are dense models", published_run, row)
