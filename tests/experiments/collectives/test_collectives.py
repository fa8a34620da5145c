"""The collectives experiment: what a sweep asks for, and its rows from two ranks."""

from unittest.mock import Mock

import pytest

from a2lib.experiments import collectives
from a2lib.experiments.collectives import Collective
from a2lib.experiments.collectives.handlers import Call, values
from a2lib.experiments.harness.ranks import RankJob, Ranks
from a2lib.lab import COLLECTIVES
from a2lib.theory.latency import OPERATIONS


def test_an_all_reduce_of_two_moves_as_many_bytes_as_it_has():
    row = {"operation": "all_reduce", "world_size": "4", "size": "2000000", "ms": "2"}
    rates = [rate(row) for rate in collectives.TIMES.derived.values()]
    assert rates == [1.0, 1.5]


@pytest.mark.gpu
def test_rows_of_two_gpus(two_gpus, measured):
    """Those of two processes on the CPU are the notebook's test's."""
    ranks = Ranks(2, "nccl")
    dtypes = ("fp32", "bf16")
    asked = [Collective(ranks, one, dtype, 4100) for one in OPERATIONS for dtype in dtypes]
    rows = measured(COLLECTIVES, collectives.tasks(asked))
    assert all(float(row["ms_queued"]) > 0 for row in rows)


@pytest.fixture
def alone(monkeypatch):
    """A job of two ranks, of which only one is there; ``everyone`` is asked as if it were all."""
    monkeypatch.setattr(RankJob, "everyone", lambda self, value: [value])
    return RankJob({}, "cpu", world_size=2)


def test_every_rank_has_an_equal_part():
    call = Call.from_size("reduce_scatter", 4100, "bf16", 3, "cpu")
    assert call.part.nbytes == 1368 and call.whole.nbytes == 3 * 1368


def test_what_the_memory_does_not_hold_is_not_tried(alone):
    key = Collective(Ranks(2, "gloo"), "all_reduce", "fp32", 2**46).key()
    row = values(alone, key)
    assert row["status"] == "oom" and row["note"].startswith("would take 422")


def test_a_wrong_result_is_seen():
    """One rank alone, with the collectives played: each sum, gather or scatter as two would."""

    def right(operation, play):
        call = Call.from_size(operation, 64, "fp32", 2, "cpu")
        object.__setattr__(call, "run", lambda: play(call))
        return call.is_right(operation, 0, 2, seed=0)

    parts = {
        "all_reduce": lambda c: c.whole.copy_(_halves(c, 3, 5)),
        "all_gather": lambda c: c.whole.copy_(_halves(c, 1, 2)),
        "reduce_scatter": lambda c: c.part.fill_(3),
        "broadcast": lambda c: None,
    }
    for operation, play in parts.items():
        assert right(operation, play), operation

        def spoilt(call, play=play, sent=operation == "reduce_scatter"):
            play(call)
            (call.part if sent else call.whole)[-1] += 1

        assert not right(operation, spoilt), operation


def _halves(call, first, second):
    return call.whole.new_tensor([first, second]).repeat_interleave(call.whole.numel() // 2)


def test_what_a_backend_does_not_have_is_unsupported(monkeypatch, alone):
    error = RuntimeError("Backend gloo does not support it")
    monkeypatch.setattr(Call, "is_right", Mock(side_effect=error))
    row = values(alone, Collective(Ranks(2, "gloo"), "broadcast", "fp32", 64).key())
    assert (row["status"], row["note"]) == ("unsupported", "Backend gloo does not support it")
