"""What a worker stores of plain attention, at the smallest sizes; and what is asked of it."""

import dataclasses
from unittest.mock import Mock

import pytest

from a2lib.experiments import attention
from a2lib.experiments.attention import Parameters, handlers
from a2lib.lab import ATTENTION, ATTENTION_LIMIT, ATTENTION_SAVED, graphs
from a2lib.lab.failures import LostContext
from a2lib.lab.graphs import Replays
from a2lib.lab.timing import Timing
from a2lib.theory.eager import Eager, by_hand_saved, longest

EVERYTHING = Parameters(sweep="all")
TINY = Parameters(seq_len=16, head_dim=8, batch=2, causal=True, calls=3)


def asked(name="eager", **over):
    return dataclasses.replace(TINY, implementations=name, **over)


@pytest.mark.parametrize("causal", [False, True])
def test_saved_tensors_are_those_of_the_theory(stored, causal):
    shape = Eager(2, 128, 16, causal)  # whole blocks, so that nothing is rounded
    tiled = dict.fromkeys("qkvo", 2 * 128 * 16 * 4) | {"lse": 2 * 128 * 4}  # no matrix
    known = {"eager": shape.saved(), "by_hand": by_hand_saved(shape), "tiled": tiled}
    for name, expected in known.items():
        (task,) = attention.saved_tasks(asked(name, seq_len=128, head_dim=16, causal=causal), "cpu")
        made = stored(handlers.saved, ATTENTION_SAVED, task)
        own = [row for row in made if row["implementation"] == name]
        assert {r["tensor"]: int(r["saved_bytes"]) for r in own} == expected | {"other": 0}


def test_what_a_cpu_cannot_do_is_a_row(stored, monkeypatch):
    (task,) = attention.pass_tasks(asked("a2lib"), "cpu")
    made = stored(handlers.passes, ATTENTION, task)
    assert {row["status"] for row in made} == {"unsupported"}
    made = stored(handlers.limit, ATTENTION_LIMIT, attention.limit_tasks(EVERYTHING, "cpu")[0])
    assert [row["status"] for row in made] == ["unsupported"]
    needed = Eager(2, 16, 8, True).total("backward")
    for available, status in ((needed - 1, "oom"), (needed, "ok")):
        monkeypatch.setattr(handlers.memory, "available_bytes", lambda n=available: n)
        (task,) = attention.pass_tasks(asked(), "cpu")
        made = stored(handlers.passes, ATTENTION, task)
        assert {r["status"] for r in made if r["implementation"] == "eager"} == {status}


def test_a_pass_without_room_is_oom_and_its_backward_says_where(stored, monkeypatch):
    monkeypatch.setitem(handlers.ATTENTIONS, "eager", Mock(side_effect=MemoryError))
    (task,) = attention.pass_tasks(asked(), "cpu")
    made = stored(handlers.passes, ATTENTION, task)
    rows = {row["pass"]: (row["status"], row["note"]) for row in made}
    assert rows["forward"] == ("oom", "out of memory")
    assert rows["backward"] == ("oom", "in its forward: out of memory")


def test_a_replay_is_the_gpus_time_or_a_reason(monkeypatch):
    monkeypatch.setattr(handlers.memory, "total_bytes", lambda device: 100)
    row = {"held_bytes": 30, "peak_bytes": 10, "ms": 1.0}
    timing = Timing(0.5, 0.5, 0.5, 3)
    for done, values, lost in (
        (Replays({"forward": timing}), {"ms_graph": 0.5}, False),
        (Replays({"forward": MemoryError()}), {"note": "no graph: out of memory"}, False),
        (Replays({}, usable=False), {"note": "no graph: the device was lost"}, True),
    ):
        monkeypatch.setattr(graphs, "time_replays", lambda *_, done=done, **__: done)
        assert handlers._replayed(None, (None,), "forward", row) == (values, lost)
    refused, lost = handlers._replayed(None, (None,), "forward", row | {"peak_bytes": 11})
    assert "not tried" in refused["note"] and not lost


def test_a_lost_device_ends_the_process_after_its_row(job, monkeypatch):
    monkeypatch.setattr(handlers, "_measure", lambda *_: ({"status": "ok", "ms": 1, "n": 1}, True))
    (task,) = attention.pass_tasks(asked(), "cpu")
    given = job(ATTENTION, task)
    with pytest.raises(LostContext, match="forward"):
        handlers.passes(given)
    assert [row["pass"] for row in given.store.rows()] == ["forward"]


def test_a_limit_is_predicted_then_tried(stored, monkeypatch):
    switched, room = [], 140 * 2**30
    for name in ("take_workspaces", "free_memory"):
        monkeypatch.setattr(handlers, name, lambda device: None)
    monkeypatch.setattr(handlers, "expandable_segments", switched.append)
    monkeypatch.setattr(handlers.memory, "free_bytes", lambda device: room)
    monkeypatch.setattr(handlers, "_fits", lambda key, job, n: n <= 30720)
    wanted = {"head_dim": 64, "causal": False, "pass": "backward"}
    found = {}
    for task in attention.limit_tasks(EVERYTHING, "cuda"):
        (((key,)),) = task.rows.values()
        if wanted.items() <= key.items():
            made = stored(handlers.limit, ATTENTION_LIMIT, task, "cuda")
            found |= {row["allocator"]: row for row in made}
    assert switched == [False, False, True, False]
    for allocator, predicted in (("blocks", "blocks"), ("expandable", "tensors")):
        row = found[allocator]
        assert (row["fits_len"], row["fails_len"]) == ("30720", "30976")
        expected = longest(8, 64, False, room, "backward", step=256, how=predicted)
        assert row["predicted_len"] == str(expected) and row["room_bytes"] == str(room)
        assert int(row["tensors_len"]) == longest(8, 64, False, room, "backward", step=256)


@pytest.mark.parametrize(("guess", "length"), [(10, 14), (14, 14), (30, 14), (0, 0), (6, 0)])
def test_the_search_ends_at_the_last_that_fits(guess, length):
    tried = []

    def fits(n):
        tried.append(n)
        return n <= length

    assert handlers.search(fits, guess, 2) == length
    assert all(n > 0 for n in tried) and len(tried) == len(set(tried))
