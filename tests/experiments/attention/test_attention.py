"""What a worker stores of plain attention, at the smallest sizes; and what is asked of it."""

import dataclasses
import weakref

import pytest

from a2lib.experiments import attention
from a2lib.experiments.attention import BEYOND, Parameters, Shape, grid, handlers
from a2lib.measure import ATTENTION, ATTENTION_LIMIT, ATTENTION_SAVED
from a2lib.measure.failures import LostContext
from a2lib.measure.graphs import Replays
from a2lib.measure.timing import Timing
from a2lib.theory.eager import Eager, by_hand_saved, longest

SMALL = Shape("fp32", 2, 16, 8, False)
EVERYTHING = Parameters(sweep="all")
TINY = Parameters(seq_len=16, head_dim=8, batch=2, causal=True, calls=3)


def asked(name="eager", **over):
    return dataclasses.replace(TINY, implementations=name, **over)


@pytest.mark.parametrize("name", ["eager", "by_hand", "tiled"])
def test_both_passes_are_measured(stored, name):
    (task,) = attention.pass_tasks(asked(name), "cpu")
    rows = {row["pass"]: row for row in stored(handlers.passes, ATTENTION, task)}
    assert set(rows) == {"forward", "backward"}
    for row in rows.values():
        assert (row["status"], row["n"], row["implementation"]) == ("ok", "3", name)
        assert 0 < float(row["ms_min"]) <= float(row["ms"]) and float(row["ms_mean"]) > 0
        assert not any(row[c] for c in ("ms_event", "ms_graph", "ms_host", "held_bytes", "note"))


@pytest.mark.parametrize("causal", [False, True])
def test_saved_tensors_are_those_of_the_theory(stored, causal):
    shape = Eager(2, 128, 16, causal)  # whole blocks, so that nothing is rounded
    for name, expected in (("eager", shape.saved()), ("by_hand", by_hand_saved(shape))):
        (task,) = attention.saved_tasks(asked(name, seq_len=128, head_dim=16, causal=causal), "cpu")
        made = stored(handlers.saved, ATTENTION_SAVED, task)
        found = {r["tensor"]: int(r["saved_bytes"]) for r in made
                 if r["implementation"] == name}  # fmt: skip
        assert found == expected | {"other": 0}


def test_counting_what_is_saved_frees_it():
    storages = []

    def attend(q, k, v, causal):
        p = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        storages.append(weakref.ref(p.untyped_storage()))
        return p @ v

    assert handlers.saved_bytes(attend, handlers.inputs_of(SMALL, "cpu", 0, "forward")[:3], False)
    assert storages[0]() is None


def test_tiled_attention_saves_no_matrix(stored):
    (task,) = attention.saved_tasks(asked("tiled", seq_len=128, head_dim=16), "cpu")
    made = stored(handlers.saved, ATTENTION_SAVED, task)
    found = {row["tensor"]: int(row["saved_bytes"]) for row in made}
    tensor, rows = 2 * 128 * 16 * 4, 2 * 128 * 4
    assert found == {"q": tensor, "k": tensor, "v": tensor, "o": tensor, "lse": rows, "other": 0}


def test_by_hand_is_eager_with_another_softmax():
    torch = pytest.importorskip("torch")
    q, k, v, do = handlers.inputs_of(Shape("fp32", 2, 33, 8, True), "cpu", 0, "backward")
    for causal in (False, True):
        results = []
        for name in ("eager", "by_hand"):
            o = handlers.ATTENTIONS[name](q, k, v, causal)
            results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
        for which, one, other in zip(("o", "dq", "dk", "dv"), *results, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, which=which: f"{which} {text}")


def test_what_a_cpu_cannot_do_is_a_row(job, monkeypatch):
    (task,) = attention.pass_tasks(asked("a2lib"), "cpu")
    given = job(ATTENTION, task)
    handlers.passes(given)
    assert {row["status"] for row in given.store.rows()} == {"unsupported"}
    task = attention.limit_tasks(EVERYTHING, "cpu")[0]
    given = job(ATTENTION_LIMIT, task)
    handlers.limit(given)
    assert [row["status"] for row in given.store.rows()] == ["unsupported"]
    needed = Eager(2, 16, 8, True).total("backward")
    for available, status in ((needed - 1, "oom"), (needed, "ok")):
        monkeypatch.setattr(handlers.memory, "available_bytes", lambda n=available: n)
        (task,) = attention.pass_tasks(asked(), "cpu")
        given = job(ATTENTION, task)
        handlers.passes(given)
        mine = [row for row in given.store.rows() if row["implementation"] == "eager"]
        assert {row["status"] for row in mine} == {status}


def test_a_pass_without_room_is_oom_and_its_backward_says_where(stored, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setitem(handlers.ATTENTIONS, "eager", refuse)
    (task,) = attention.pass_tasks(asked(), "cpu")
    made = stored(handlers.passes, ATTENTION, task)
    rows = {row["pass"]: (row["status"], row["note"]) for row in made}
    assert rows["forward"] == ("oom", "out of memory")
    assert rows["backward"] == ("oom", "in its forward: out of memory")


def test_a_replay_is_the_gpus_time_or_a_reason(monkeypatch):
    from a2lib.measure import graphs

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


class Event:
    """A CUDA event of a device that takes 2 ms for everything."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, other):
        return 2.0


def test_a_gpus_row_has_its_times_and_its_memory(stored, monkeypatch):
    """On a stand-in: tensors stay on the CPU, and what is allocated is made up."""
    torch = pytest.importorskip("torch")
    made = handlers.inputs_of
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(handlers, "synchronize", lambda device: None)
    monkeypatch.setattr(handlers, "inputs_of", lambda shape, _, *more: made(shape, "cpu", *more))
    monkeypatch.setattr(handlers, "take_workspaces", lambda device: None)
    monkeypatch.setattr(handlers, "free_memory", lambda device: None)
    allocated = iter([100, 107, 100, 109])
    monkeypatch.setattr(handlers.memory, "allocated_bytes", lambda device: next(allocated))
    monkeypatch.setattr(handlers, "peak_bytes", lambda call: 77)
    monkeypatch.setattr(handlers, "_replayed", lambda *_: ({"ms_graph": 1.5}, False))
    (task,) = attention.pass_tasks(asked(), "cuda")
    rows = {row["pass"]: row for row in stored(handlers.passes, ATTENTION, task, "cuda")}
    assert {pass_: row["held_bytes"] for pass_, row in rows.items()} == {
        "forward": "7", "backward": "9",
    }  # fmt: skip
    for row in rows.values():
        assert (row["status"], row["peak_bytes"]) == ("ok", "77")
        assert (row["ms_event"], row["ms_graph"]) == ("2.0", "1.5")
        assert 0 < float(row["ms_host"]) <= float(row["ms"])


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


def test_the_grid_is_the_handouts():
    shapes = {(s.batch, s.seq_len, s.head_dim, s.causal) for name, s, n in grid("cuda")
              if (name, n, s.dtype) == ("eager", 100, "fp32")}  # fmt: skip
    assert shapes == {
        (8, n, d, causal)
        for n in (256, 1024, 4096, 8192, 16384)
        for d in (16, 32, 64, 128)
        for causal in (False, True)
    }
    everything = EVERYTHING.configurations("cuda")
    assert {s.seq_len for name, s, n in everything if n < 100} == set(BEYOND)
    # Beside the grid one size of a vector tells: which fails where is the limits' to find.
    beside = {name: {s.head_dim for other, s, n in everything if other == name and (
        name != "eager" or n < 100)} for name in ("eager", "by_hand", "a2lib")}  # fmt: skip
    assert beside == dict.fromkeys(beside, {64})
    assert len(attention.limit_tasks(EVERYTHING, "cuda")) == 2 * 2 * 4 * 2
