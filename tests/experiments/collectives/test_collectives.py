"""The collectives experiment: what a sweep asks for, and its rows from two ranks."""

import pytest

from a2lib.experiments import collectives
from a2lib.experiments.collectives import handlers
from a2lib.experiments.collectives.configurations import (
    HANDOUT_SIZES,
    MB,
    SWEEPS,
    Collective,
    Parameters,
)
from a2lib.experiments.collectives.handlers import Call
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.ranks import RankJob, Ranks
from a2lib.experiments.harness.sweep import Sweep
from a2lib.measure import COLLECTIVES, Store, start_run
from a2lib.theory.latency import OPERATIONS


def test_the_handout_is_every_size_and_number_of_processes():
    found = Parameters(sweep="handout").collectives(gpus=6)
    asked = {(c.ranks.backend, c.ranks.world_size, c.size) for c in found}
    assert asked == {(b, n, s) for b in ("nccl", "gloo") for n in (2, 4, 6) for s in HANDOUT_SIZES}
    assert {(c.operation, c.dtype) for c in found} == {("all_reduce", "fp32")}
    two = Parameters(sweep="handout").collectives(gpus=3)
    assert {c.ranks.world_size for c in two if c.ranks.backend == "nccl"} == {2}
    assert not any(c.ranks.backend == "nccl" for c in Parameters(sweep="all").collectives(gpus=1))


def test_a_sweep_has_each_collective_once_and_starts_each_group_once():
    found = Parameters(sweep="all").collectives(gpus=8)
    assert len(set(found)) == len(found)
    order = [task.ranks for task in collectives.tasks(found)]
    assert order == sorted(order, key=order.index)  # those of one group follow each other
    assert {c.operation for c in found} == set(OPERATIONS)
    first = collectives.tasks(found)[0]
    assert first.label == "all_reduce fp32, nccl 2"
    assert list(first.rows)[:4] == ["1 MB", "10 MB", "100 MB", "1024 MB"]
    together = {c for sweep in SWEEPS[:-1] for c in Parameters(sweep=sweep).collectives(8)}
    assert together == set(found)


def test_one_size_by_default_and_no_size_beside_a_sweep(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (one,) = Parameters().collectives(gpus=0)
    assert one == Collective(Ranks(2, "gloo"), "all_reduce", "fp32", MB)
    with pytest.raises(ParameterError, match="nccl: allowed is gloo alone, without a GPU"):
        Parameters(backend="nccl").collectives(gpus=0)
    with pytest.raises(ParameterError, match="megabytes = 3: sweep all has its own"):
        Parameters(sweep="all", megabytes=3)


def test_rows_of_two_ranks(tmp_path):
    """All operations, in a size that two ranks have no equal parts of."""
    asked = [
        Collective(Ranks(2, "gloo"), operation, dtype, size)
        for operation, dtype, size in [(o, "fp32", 4100) for o in OPERATIONS]
        + [("all_reduce", "bf16", 2**16), ("all_reduce", "fp32", 2**46)]
    ]
    store = Store(COLLECTIVES, "cpu", data=tmp_path)
    run = start_run(command="test", parameters={}, device="cpu", data=tmp_path)
    assert Sweep(store, run, "cpu", seed=3).measure(collectives.tasks(asked)) == 0
    rows = {(r["operation"], r["dtype"], int(r["size"])): r for r in store.rows()}
    huge = rows.pop(("all_reduce", "fp32", 2**46))
    assert set(rows) == {(c.operation, c.dtype, c.size) for c in asked[:-1]}
    for row in rows.values():
        assert row["status"] == "ok", row
        columns = ("ms_rank_min", "ms_rank_median", "ms_rank_max", "ms_p80")
        times = [float(row[column]) for column in columns]
        assert times == sorted(times) and times[0] > 0 and int(row["n"]) >= 5
        assert row["ms_queued"] == "" and row["conditions"].endswith("cores")
    assert huge["status"] == "oom" and huge["note"].startswith("would take 422")


def test_a_wrong_result_is_seen(monkeypatch):
    """One rank alone, with the collectives played: each sum, gather or scatter as two would."""

    def right(operation, play):
        call = Call.of(operation, 64, "fp32", 2, "cpu")
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

        def spoilt(call, play=play):
            play(call)
            call.result.view(-1)[-1] += 1

        assert not right(operation, spoilt), operation


def _halves(call, first, second):
    return call.whole.new_tensor([first, second]).repeat_interleave(call.whole.numel() // 2)


def test_what_a_backend_does_not_have_is_unsupported(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Backend gloo does not support it")

    monkeypatch.setattr(Call, "is_right", refuse)
    monkeypatch.setattr(RankJob, "everyone", lambda self, value: [value])
    job = RankJob({}, "cpu", world_size=2)
    key = Collective(Ranks(2, "gloo"), "broadcast", "fp32", 64).key()
    row = handlers._measure(job, key)
    assert (row["status"], row["note"]) == (
        "unsupported", "Backend gloo does not support it",
    )  # fmt: skip
