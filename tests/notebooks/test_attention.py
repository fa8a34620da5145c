"""notebooks/attention.ipynb: what it asks for, predicts and stores."""

import committed
import pytest
import torch
from notebook_cells import identities, load_cells, published, run_cells
from tables import values, where

from a2lib.lab import sweep
from a2lib.lab.notebook import Run
from a2lib.lab.sanity import WrongResult

TINY = {"seq_len": 16, "head_dim": 8, "batch": 2, "causal": True, "calls": 3}

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def gpu_cells(monkeypatch):
    """Return the cells as they are where there is a GPU."""
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    return load_cells("attention", sweep="all")


def numbers(row, *columns):
    """Return a committed row with these columns as numbers."""
    row = {**row, "causal": row["causal"] == "true"}
    for column in columns:
        row[column] = int(row[column])
    return row


def test_the_sweeps_ask_for_every_committed_row(gpu_cells):
    for table, tasks in (
        (gpu_cells.table, [gpu_cells.pass_keys()]),
        (gpu_cells.saved, gpu_cells.saved_tasks()),
        (gpu_cells.limits, [gpu_cells.limit_keys()]),
    ):
        assert identities(table, tasks) == published(table)


def test_the_formula_has_what_tensors_took_at_every_committed_peak():
    cells = load_cells("attention")
    sizes = ("batch", "seq_len", "head_dim", "held_bytes", "peak_bytes")
    for row in where(committed.measured("attention"), implementation="eager", status="ok"):
        row = numbers(row, *sizes)
        counted = cells.tensors_at_peak(row)
        indices = 2 * 8 * row["seq_len"] if row["causal"] else 0
        assert 0 <= row["held_bytes"] + row["peak_bytes"] - counted <= indices


def test_the_formula_gives_every_committed_prediction():
    cells = load_cells("attention")
    sizes = ("batch", "head_dim", "room_bytes", "tensors_len", "predicted_len")
    for row in committed.measured("attention_limit"):
        row = numbers(row, *sizes)
        room, in_blocks = row["room_bytes"], row["allocator"] == "blocks"
        assert cells.longest(row, room, in_blocks=False) == row["tensors_len"]
        assert cells.longest(row, room, in_blocks) == row["predicted_len"]


@pytest.mark.slow
def test_rows_are_stored_and_a_readers_own_beside_them():
    mine = """
MAKE["mine"] = lambda q, k, v, is_causal: torch.nn.functional.scaled_dot_product_attention(
    q, k, v, is_causal=is_causal
)
MAKE["wrong"] = lambda q, k, v, is_causal: attention_reference(q, k, v, not is_causal)
"""
    cells = run_cells("attention", {"attentions": mine}, **TINY, implementations="all")
    frame = cells.table.frame(cells.pass_keys()).set_index(["implementation", "pass"])
    assert len(frame) == 2 * len(cells.MAKE)
    for name in cells.MAKE:
        expected = {"a2lib": "unsupported", "wrong": "error"}.get(name, "ok")
        assert set(frame.loc[name, "status"]) == {expected}, name
    assert "wrong o: error" in frame.loc[("wrong", "forward"), "note"]
    assert set(frame.loc["eager", "n"]) == {3}
    kept = cells.saved.frame().set_index(["implementation", "tensor"])
    assert kept.loc[("mine", "v"), "saved_bytes"] == 2 * 16 * 8 * 4


@pytest.mark.parametrize("causal", [False, True])
def test_saved_tensors_are_the_matrices_or_none(causal):
    asked = {**TINY, "seq_len": 128, "head_dim": 16, "causal": causal}
    cells = load_cells("attention", **asked, implementations="eager,by_hand,tiled")
    vector, matrix = 2 * 128 * 16 * 4, 2 * 128 * 128 * 4
    numbers_a_query = {"sums": 2 * 128 * 4, "places of the maxima": 2 * 128 * 8}
    mask = {"mask": 128 * 128} if causal else {}
    expected = {
        "eager": {"p": matrix, **mask},
        "by_hand": {"p": matrix, "exponentials": matrix, **numbers_a_query, **mask},
        "tiled": {"o": vector, "lse": 2 * 128 * 4},
    }
    for task in cells.saved_tasks():
        sizes = dict(values(cells.measure_saved(task), "tensor", "saved_bytes"))
        own = expected[task[0]["implementation"]]
        assert sizes == {**dict.fromkeys("qkv", vector), **own, "other": 0}


def test_a_limit_on_a_cpu_is_unsupported_and_too_long_a_sequence_is_oom(monkeypatch):
    cells = load_cells("attention", sweep="limit")
    run = Run("attention", {}, {}, "cpu", "cpu")
    key = cells.limit_keys()[0]
    assert sweep(cells.limits, [[key]], cells.measure_limit, run) == 0
    (row,) = cells.limits.rows()
    assert (row["status"], row["note"]) == (
        "unsupported",
        "a CPU does not refuse memory: it swaps",
    )
    cells = load_cells("attention", **TINY)
    (key, _) = cells.pass_keys()
    monkeypatch.setattr(cells.memory, "available_bytes", lambda: cells.tensors_at_peak(key) - 1)
    with pytest.raises(MemoryError):
        list(cells.measure_passes([key]))


def test_the_check_sees_a_wrong_gradient():
    cells = load_cells("attention", **TINY)
    forward, backward = cells.pass_keys()

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal):
            ctx.save_for_backward(q, k, v)
            ctx.is_causal = is_causal
            return cells.MAKE["eager"](q, k, v, is_causal)

        @staticmethod
        def backward(ctx, do):
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                o = cells.MAKE["eager"](*leaves, ctx.is_causal)
            dq, dk, dv = torch.autograd.grad(o, leaves, do)
            return dq, 1.01 * dk, dv, None

    cells.check(cells.MAKE["eager"], backward)
    cells.check(Wrong.apply, forward)
    with pytest.raises(WrongResult, match="wrong dk"):
        cells.check(Wrong.apply, backward)
