"""Snapshots of the allocator: one that a person can add up, and a recorder of a GPU that is not."""

import math
from operator import attrgetter

import allocations
import pandas as pd
import pytest
import torch
from allocations import recorded
from refusals import refused
from tables import values

from a2lib.lab import snapshot as memory
from a2lib.model import TransformerLM, cross_entropy
from a2lib.theory.memory.step import CATEGORIES


def bytes_by_category(row):
    return {category: row[category] for category in CATEGORIES if row[category]}


def timeline(phase, points):
    """Return the timeline of the recording, and in all the bytes of each moment."""
    table = pd.DataFrame(memory.timeline_rows(recorded(), phase, points))
    return table.assign(total=table[list(CATEGORIES)].sum(axis="columns"))


def test_allocations_have_ends_categories_and_lines():
    found, line = recorded(), "model/layers.py:40 forward"
    shown = attrgetter("bytes", "start_us", "end_us", "category", "phase", "name", "line")
    assert list(map(shown, found.allocations)) == [
        (1000, -math.inf, math.inf, "parameters", "", "w", ""),
        (400, 10, 30, "temporaries", "step 0/forward", "", line),
        (600, 20, 50, "saved for backward", "step 0/forward", "ffn", line),
        (300, 40, math.inf, "gradients", "step 0/backward", "w", ""),
    ]
    assert found.unexplained_bytes == 0


def test_the_timeline_by_category():
    whole = timeline("step 0", 100)
    assert list(whole["time_us"]) == [0, 0, 10, 20, 30, 40]
    assert list(whole["total"]) == [1000, 1400, 2000, 1600, 1900, 1300]
    assert list(whole["phase"]) == ["step 0/forward"] * 4 + ["step 0/backward"] * 2
    forward = {"parameters": 1000, "temporaries": 400, "saved for backward": 600}
    assert bytes_by_category(whole.loc[2]) == forward
    assert bytes_by_category(whole.loc[5]) == {"parameters": 1000, "gradients": 300}
    assert list(timeline("step 0", points=4)["total"]) == [1000, 2000, 1300]


def test_the_peak_of_a_phase():
    whole = {"parameters": 1000, "temporaries": 400, "saved for backward": 600}
    assert bytes_by_category(memory.peak(recorded(), "step 0")) == whole
    backward = {"parameters": 1000, "saved for backward": 600, "gradients": 300}
    assert bytes_by_category(memory.peak(recorded(), "step 0/backward")) == backward


def test_the_largest_by_line_of_code():
    rows = memory.line_rows(recorded(), "step 0", 20)
    line = "model/layers.py:40 forward"
    assert values(rows, "bytes", "count", "phase", "name", "line") == [
        (600, 1, "forward", "ffn", line),
        (400, 1, "forward", "", line),
        (300, 1, "backward", "w", ""),
    ]
    inside = memory.line_rows(recorded(), "step 0/forward", 1)
    assert values(inside, "bytes") == [600]


def test_what_nobody_owns_is_other():
    found = memory.read(allocations.snapshot())
    assert set(map(attrgetter("category"), found.allocations)) == {"other"}


def test_blocks_that_the_history_does_not_explain_are_said():
    snapshot = allocations.snapshot()
    snapshot["segments"][0]["blocks"][1]["requested_size"] = 310
    assert memory.read(snapshot).unexplained_bytes == 10


def test_a_full_history_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "MAX_ENTRIES", 8)
    refused("history is full .8 entries.", memory.read, allocations.snapshot())


@pytest.fixture
def no_history(monkeypatch):
    """PyTorch's history of a GPU that is not there: as by hand, whatever runs."""
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocations.snapshot)


def test_a_recorder_knows_who_holds_what(no_history):
    """Two steps of a tiny model."""
    with memory.Recorder() as recorder:
        model = TransformerLM(19, 12, 24, 2, 2, 40, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        recorder.watch(model, optimizer)
        tokens, targets = torch.randint(19, (2, 2, 12))
        for i in range(2):
            with recorder.phase(f"step {i}"):
                with recorder.phase("forward"):
                    loss = cross_entropy(model(tokens), targets)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    assert list(map(attrgetter("name"), recorder.recording.phases)) == [
        "step 0/forward", "step 0/backward", "step 0/optimizer", "step 0",
        "step 1/forward", "step 1/backward", "step 1/optimizer", "step 1",
    ]  # fmt: skip
    held = set(map(attrgetter("category", "name"), recorder._owners))
    assert ("saved for backward", "layers.1.ffn.w2") in held
    assert ("gradients", "layers.1.ffn.w2.weight") in held
    assert ("parameters", "lm_head.weight") in held
    assert ("optimizer state", "lm_head.weight exp_avg") in held
