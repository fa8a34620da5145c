"""Snapshots of the allocator: one that a person can add up, one recorded on a CPU, broken ones."""

import math
import pickle
import weakref
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from profiles import make
from refusals import refused

from a2lib.lab import snapshot as memory
from a2lib.model import TransformerLM, cross_entropy

FILE = Path(make.__file__).parent / "cuda_memory.pickle"


def snapshot_with(**changes):
    return pickle.dumps({**make.snapshot(), **changes})


def write(path, **changes):
    """The snapshot by hand, parts of it replaced."""
    path.write_bytes(snapshot_with(**changes))
    return path


def bytes_by_category(row):
    return {category: row[category] for category in memory.CATEGORIES if row[category]}


def test_allocations_have_ends_categories_and_lines():
    found, line = memory.read(FILE), "model/layers.py:40 forward"
    shown = attrgetter("bytes", "start_us", "end_us", "category", "phase", "name", "line")
    assert [shown(allocation) for allocation in found.allocations] == [
        (1000, -math.inf, math.inf, "parameters", "", "w", ""),
        (400, 10, 30, "temporaries", "step 0/forward", "", line),
        (600, 20, 50, "saved for backward", "step 0/forward", "ffn", line),
        (300, 40, math.inf, "gradients", "step 0/backward", "w", ""),
    ]
    assert found.unexplained_bytes == 0


def test_the_timeline_by_category():
    rows = memory.timeline_rows(memory.read(FILE))
    totals = [sum(bytes_by_category(row).values()) for row in rows]
    phases = [row["phase"].rpartition("/")[2] for row in rows]
    assert [row["time_us"] for row in rows] == [0, 0, 10, 20, 30, 40]
    assert totals == [1000, 1400, 2000, 1600, 1900, 1300]
    assert phases == ["forward"] * 4 + ["backward"] * 2
    forward = {"parameters": 1000, "temporaries": 400, "saved for backward": 600}
    assert bytes_by_category(rows[2]) == forward
    assert bytes_by_category(rows[5]) == {"parameters": 1000, "gradients": 300}


def test_the_peak_of_a_phase_and_what_is_alive_at_it():
    found = memory.read(FILE)
    for phases, total, where in (
        ((None, "step 0", "forward"), 2000, "step 0/forward"),
        (("backward", "step 0/backward"), 1900, "step 0/backward"),
    ):
        for phase in phases:
            peak = memory.peak(found, phase)
            assert (peak.total, peak.phase) == (total, where)
            largest = memory.largest_rows(peak, 2)
            assert [(row["bytes"], row["rank"]) for row in largest] == [(1000, 1), (600, 2)]


def test_the_largest_by_line_of_code():
    found = memory.read(FILE)
    rows = memory.line_rows(found, "step 0")
    line = "model/layers.py:40 forward"
    assert [(r["bytes"], r["count"], r["phase"], r["name"], r["line"]) for r in rows] == [
        (600, 1, "forward", "ffn", line),
        (400, 1, "forward", "", line),
        (300, 1, "backward", "w", ""),
    ]
    assert [r["bytes"] for r in memory.line_rows(found, "forward", 1)] == [600]
    assert memory.line_rows(found, "step 1") == []


def test_what_was_there_when_a_phase_began_counts_for_it(tmp_path):
    notes = {**make.snapshot()["a2lib"], "phases": [["late", 32, 38]], "owners": []}
    found = memory.read(write(tmp_path / "x", a2lib=notes))
    assert memory.peak(found, "late").total == 1600
    refused("'loss': allowed are late", memory.peak, found, "loss")


def test_without_notes_bytes_are_other(tmp_path):
    make.write_snapshot(tmp_path / "x", notes=False)
    found = memory.read(tmp_path / "x")
    assert {a.category for a in found.allocations} == {"other"} and not found.phases
    assert memory.peak(found).total == 2000


def test_what_was_freed_without_having_been_seen_was_there_before(tmp_path):
    trace = make.snapshot()["device_traces"][0]
    first = {**trace[3], "addr": 9000, "size": 70, "time_us": 9}
    found = memory.read(write(tmp_path / "x", device_traces=[[first, *trace]]))
    before, *_, after = (bytes_by_category(row) for row in memory.timeline_rows(found))
    assert (sum(before.values()), sum(after.values())) == (1070, 1300)


def test_blocks_that_the_history_does_not_explain_are_said(tmp_path):
    broken = make.snapshot()
    broken["segments"][0]["blocks"][1]["requested_size"] = 310
    assert memory.read(write(tmp_path / "x", **broken)).unexplained_bytes == 10


def test_a_recorded_step_knows_who_saved_what(tmp_path):
    """Two steps of a tiny model on the CPU."""
    with memory.Recorder(tmp_path / "x", "cpu") as recorder:
        model = TransformerLM(19, 12, 24, 2, 2, 40, seed=0)
        recorder.watch(model)
        tokens, targets = torch.randint(19, (2, 2, 12))
        for i in range(2):
            with recorder.phase(f"step {i}"):
                with recorder.phase("forward"):
                    loss = cross_entropy(model(tokens), targets)
                with recorder.phase("backward"):
                    loss.backward()
                model.zero_grad()
    found = memory.read(tmp_path / "x")
    saved = [a for a in found.allocations if a.category == "saved for backward"]
    (gate,) = (a for a in saved if a.name == "layers.1.ffn.w2" and a.phase == "step 1/forward")
    assert gate.bytes == 2 * 12 * 40 * 4
    assert gate.line.startswith("model/layers.py:") and gate.line.endswith(" forward")
    assert found.phase_at(gate.end_us) == "step 1/backward"


def test_a_recording_that_fails_is_written_too(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(KeyError), memory.Recorder(path, "cpu"):
        kept = torch.ones(10)
        raise KeyError("a step")
    assert memory.peak(memory.read(path)).total == kept.nbytes


def test_a_forward_without_a_backward_is_freed(tmp_path):
    with memory.Recorder(tmp_path / "m.pickle", "cpu") as recorder:
        layer = torch.nn.Linear(4, 4)
        recorder.watch(layer)
        with recorder.phase("forward"):
            p = layer(torch.ones(2, 4)).softmax(-1)
        storage = weakref.ref(p.untyped_storage())
        assert storage() is not None
        del p
        assert storage() is None


class Harm:
    def __reduce__(self):
        return (print, ("harm",))


BROKEN = {
    "no pickle": (b"hello", "no pickle, or one cut short"),
    "cut": (FILE.read_bytes()[:300], "no pickle, or one cut short"),
    "code": (pickle.dumps(Harm()), "asks for builtins.print; a snapshot holds plain data alone"),
    "another": (pickle.dumps({"segments": []}), "it lacks 'device_traces'"),
    "empty": (snapshot_with(device_traces=[[], []]), "no event was recorded"),
    "an event": (snapshot_with(device_traces=[[3]]), "no snapshot of PyTorch's allocator"),
    "full": (
        snapshot_with(a2lib={"max_entries": 8}),
        "history is full .8 entries. and has lost its beginning",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_snapshot_is_one_line(what, tmp_path, capsys):
    content, words = BROKEN[what]
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    raised = refused(words, memory.read, path, error=memory.SnapshotError)
    assert str(raised).startswith(str(path))
    assert capsys.readouterr().out == ""
