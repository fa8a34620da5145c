"""What the cells of notebooks/flash.ipynb measure: at the smallest size on the CPU, and on a
stand-in for a GPU."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from notebook_cells import fits, flat, load_cells, run_cells
from tables import by, values, where

from a2lib import lab
from a2lib.attention import attention_reference
from a2lib.attention.ladder import HOPPER, RUNGS
from a2lib.lab import failures
from a2lib.paths import ROOT

QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
LOST = RuntimeError("CUDA error: an illegal memory access")
TINY = {"seq_len": 40, "head_dim": 16, "heads": 2}
PASSES = ("forward", "backward", "end_to_end")


@pytest.fixture
def cells(configured):
    """``cells(**parameters)``: the notebook's names, with quick timing."""

    def load(**parameters):
        loaded = load_cells("flash", **parameters)
        for settings in loaded.TIMING.values():
            settings.update(QUICK)
        return loaded

    return load


@pytest.fixture
def on_a_gpu(cells, monkeypatch):
    """``on_a_gpu(**parameters)``: the notebook's names where there is a GPU."""
    monkeypatch.setattr(lab, "device_kind", lambda: "cuda")
    return cells


def test_the_line_for_ones_own_attention_runs_as_it_stands(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    text = (ROOT / "notebooks" / "flash.ipynb").read_text(encoding="utf-8").replace('\\"', '"')
    [line] = re.findall(r'(MAKE\["mine"\] = torch[\w.]+)', text)
    rows = run_cells("flash", {"make": line}, **TINY).rows
    rows = rows[rows["implementation"] == "mine"]
    assert list(rows["pass"]) == [*PASSES] and set(rows["status"]) == {"ok"}
    assert (rows["n"] >= 5).all()


def measured(notebook, keys, *implementations):
    """Return the rows of these implementations' keys, of all by default, by both names."""
    if implementations:
        keys = [key for key in keys if key["implementation"] in implementations]
    rows = by(notebook.measure(keys), "implementation", "pass")
    assert set(rows) == set(values(keys, "implementation", "pass"))
    return rows


def statuses(rows, name):
    """Return what became of the forward, of the backward and of both."""
    return [rows[name, pass_].get("status", "ok") for pass_ in PASSES]


def wrong(q, k, v, is_causal):
    return attention_reference(q, k, v, is_causal=not is_causal)


class WrongBackward(torch.autograd.Function):
    """Right forwards alone."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        return attention_reference(q, k, v, is_causal)

    @staticmethod
    def backward(ctx, do):
        return do, do, do, None


def failing_late(error):
    """Right while it is checked; it raises where it is timed."""
    calls = []

    def attend(q, k, v, is_causal):
        calls.append(1)
        if len(calls) > 6:
            raise error
        return attention_reference(q, k, v, is_causal)

    return attend


# What is asked for


@pytest.mark.parametrize("name, change", [
    ("flash", {}),
    ("flash_grouped", {}),
    ("ceiling", {}),
    ("flash_accuracy", {}),
    ("flash_protocol", {"second": "0"}),
    ("flash_ladder", {"gpu": "cpu"}),
])  # fmt: skip
def test_every_committed_row_can_be_measured_again(on_a_gpu, monkeypatch, name, change):
    """Later seconds and other GPUs come with the rows that are asked for, and
    FlashAttention-4 where it is installed."""
    for module in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__spec__="found"))
    notebook = on_a_gpu(sweep="all")
    tasks = {
        "flash": notebook.tasks,
        "flash_grouped": notebook.grouped_tasks,
        "ceiling": [notebook.ceiling_keys],
        "flash_accuracy": notebook.errors_asked,
        "flash_protocol": notebook.other_tasks + notebook.first_tasks,
        "flash_ladder": notebook.ladder_tasks,
    }[name]
    table = lab.Table(name, "nvidia-h200", ROOT / "data")
    asked = set()
    for key in flat(tasks):
        identity = table.identify({**key, **change})
        assert identity not in asked
        asked.add(identity)
    assert table.rows()
    for row in table.rows():
        assert table.identify({**row, **change}) in asked


def test_a_cpu_measures_what_it_can(cells):
    (keys,) = cells().tasks
    assert set(values(keys, "implementation")) == {"eager", "tiled", "sdpa_flash"}
    assert set(values(keys, "seq_len", "dtype")) == {(128, "fp32")}


# flash


def test_times_are_positive_and_in_order(cells):
    notebook = cells(**TINY, implementations="eager,sdpa_flash,tiled")
    rows = measured(notebook, notebook.tasks[0])
    assert len(rows) == 9
    for row in rows.values():
        assert fits(row, notebook.table.section) and row["n"] >= 2
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] < math.inf
        # The host does the work itself here.
        assert row["ms_host"] is row["sm_mhz"] is row["peak_bytes"] is None


@pytest.mark.parametrize("bad, status, note", [
    (wrong, "error", "WrongResult: wrong o"),
    (failing_late(OUT_OF_MEMORY), "oom", "out of memory"),
], ids=["wrong", "late"])  # fmt: skip
def test_what_fails_or_is_wrong_has_no_time_and_the_others_go_on(cells, bad, status, note):
    notebook = cells(**TINY)
    notebook.MAKE["bad"] = bad
    keys = notebook.keys_at(notebook.shapes_of("shape")[0])
    rows = measured(notebook, keys, "bad", "eager")
    assert statuses(rows, "eager") == ["ok"] * 3
    failing = where(rows.values(), implementation="bad", status=status)
    assert failing and set(statuses(rows, "bad")) <= {"ok", status}
    for row in failing:
        assert row["note"].startswith(note) and row.get("ms") is row.get("peak_bytes") is None


def test_grouped_keys_are_measured_and_one_that_forgets_the_groups_is_refused(cells):
    notebook = cells(sweep="grouped")
    (keys,) = notebook.grouped_tasks
    assert keys[0]["heads"] > keys[0]["kv_heads"]

    def first_group_for_all(q, k, v, is_causal):
        return attention_reference(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), is_causal)

    notebook.MAKE["tiled"] = first_group_for_all
    rows = measured(notebook, keys)
    assert statuses(rows, "eager") == ["ok"] * 3 and statuses(rows, "tiled") == ["error"] * 3


def test_a_backward_that_is_wrong_leaves_the_forward(cells):
    notebook = cells(**TINY)
    notebook.MAKE["eager"] = WrongBackward.apply
    rows = measured(notebook, notebook.tasks[0], "eager")
    assert statuses(rows, "eager") == ["ok", "error", "error"]
    assert "wrong dq" in rows["eager", "backward"]["note"]


def test_what_needs_a_gpu_is_refused_with_the_reason(cells):
    notebook = cells(**TINY, implementations="a2lib,flex,fa4,sdpa_cudnn")
    rows = list(notebook.measure(notebook.tasks[0]))
    assert values(rows, "status") == ["unsupported"] * 12
    assert rows[0]["note"] == "a2lib needs a CUDA GPU"


def test_what_cannot_fit_the_cpu_is_not_run(cells, monkeypatch):
    notebook = cells(**TINY, implementations="eager,sdpa_flash")
    monkeypatch.setattr(notebook.memory, "available_bytes", lambda: 1)
    rows = measured(notebook, notebook.tasks[0])
    assert statuses(rows, "eager") == ["oom"] * 3 and statuses(rows, "sdpa_flash") == ["ok"] * 3


def test_a_lost_device_ends_the_process_and_blames_nobody_in_turns(cells):
    notebook = cells(**TINY)
    notebook.MAKE["eager"] = failing_late(LOST)
    with pytest.raises(failures.LostContext, match="illegal memory access"):
        measured(notebook, notebook.tasks[0], "eager", "sdpa_flash")


# The tables beside it


def test_ceilings_have_a_time_each(cells):
    notebook = cells()
    for settings in notebook.BURST.values():
        settings.update(QUICK)
    rows = list(notebook.measure_ceilings(notebook.ceiling_keys))
    assert values(rows, "operation") == ["matmul"] * 3 + ["copy"]
    for row in rows:
        assert row["ms"] > 0 and fits(row, notebook.ceiling.section)


@pytest.mark.parametrize("right", [True, False])
def test_a_ladder_of_a_cpu(cells, replace, right):
    notebook = cells(sweep="ladder")
    replace(notebook, flash_attention=attention_reference if right else wrong)
    (keys,) = notebook.ladder_tasks
    rows = list(notebook.measure_ladder(keys))
    assert len(rows) == len(keys) == 2 * len([*RUNGS, *notebook.LADDER_PEERS])
    for row in rows:
        assert fits(row, notebook.ladder.section) and row["gpu"] == "cpu"
        if row["rung"] in ("sdpa_cudnn", *HOPPER):
            assert row["status"] == "unsupported"
        elif right or row["rung"] == "sdpa_flash":
            assert row["ms"] > 0 and row.get("status", "ok") == "ok"
        else:
            assert row["status"] == "error" and "wrong o" in row["note"] and "ms" not in row


def protocol_task(notebook, name):
    """Return the first task of a protocol of the leaderboard, at a small size."""
    keys = notebook.protocol_tasks(name)[0]
    return [{**key, "heads": 1, "seq_len": 64, "head_dim": 16} for key in keys]


@pytest.fixture
def board(cells):
    return cells(sweep="leaderboard")


def test_burst_is_a_row_for_each_with_its_mean(board):
    rows = list(board.measure_protocols(protocol_task(board, "burst")))
    assert values(rows, "implementation") == ["eager", "sdpa_flash"]
    for row in rows:
        assert fits(row, board.protocol.section) and row["second"] == 0 and row["n"] > 0
        assert row["ms"] > 0 and row["ms_mean"] > 0 and row["sm_mhz"] is None


def test_sustained_is_a_row_for_each_second_and_the_first_is_stored_last(board):
    """But for seconds in which a busy machine began no call."""
    board.SUSTAINED["cpu"].update(n_seconds=3, second_s=0.2, idle_s=0.0)
    rows = list(board.measure_protocols(protocol_task(board, "sustained")[:1]))
    seconds = values(rows, "second")
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0
    for row in rows:
        assert row["ms_mean"] > 0 and row["n"] > 0 and fits(row, board.protocol.section)


def test_what_is_wrong_gets_no_time_by_a_protocol(board):
    board.MAKE["eager"] = wrong
    rows = by(board.measure_protocols(protocol_task(board, "burst")), "implementation")
    assert rows["eager"]["status"] == "error" and "wrong o" in rows["eager"]["note"]
    assert "ms" not in rows["eager"] and rows["sdpa_flash"]["ms"] > 0


def test_in_a_fixed_order_is_what_is_checked_and_timed(board):
    orders = []

    def attend(q, k, v, is_causal):
        orders.append(torch.are_deterministic_algorithms_enabled())
        assert not torch.utils.deterministic.fill_uninitialized_memory
        return attention_reference(q, k, v, is_causal)

    board.MAKE["eager"] = attend
    rows = list(board.measure_protocols(protocol_task(board, "fixed_order")[:1]))
    assert rows[0]["ms"] > 0 and all(orders) and len(orders) > 4
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_first_calls_are_three_seconds_and_wrong_ones_an_error(board):
    (key,) = protocol_task(board, "first")
    rows = list(board.measure_first([key]))
    assert values(rows, "second") == [2, 1, 0]
    for row in rows:
        assert row["ms"] > 0 and fits(row, board.protocol.section)
    board.MAKE["eager"] = wrong
    with pytest.raises(RuntimeError, match="wrong o"):
        list(board.measure_first([key]))


@pytest.mark.parametrize("name", ["eager", "sdpa_flash"])
def test_the_board_sums_and_differentiates_three_dimensions(board, replace, monkeypatch, name):
    made, real = [], torch.randn

    def randn(*sizes, **options):
        made.append(real(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    (key,) = where(flat(board.protocol_tasks("board")), implementation=name)
    with pytest.raises(board.UnsupportedError):
        board.board_call(key)
    replace(board, ON_GPU=True)
    call = board.board_call(key)
    qkv, do = made
    assert qkv.shape == (3, 2, 256, 64) and do.shape == (2, 256, 64) and qkv.grad is None
    call()
    exact = qkv.detach()[:, None].double().requires_grad_()
    attention_reference(*exact.unbind(), True).sum().backward()
    right = exact.grad.squeeze(1)
    assert (qkv.grad - right).norm() < 0.02 * right.norm()


def accuracy_task(notebook, scale):
    """Return the first task of eager fp32 scores of this size, at few tokens."""
    for task in notebook.accuracy_tasks():
        if where(task, implementation="eager", score_scale=scale, dtype="fp32"):
            return [{**key, "seq_len": 24, "head_dim": 16} for key in task]


@pytest.mark.parametrize("larger", [0, 0.5])
def test_a_known_error_is_found_in_each_tensor(board, larger):
    """The reference differs by rounding. Outputs half as large again have an error of a half, and
    so have their gradients."""
    board.MAKE["eager"] = lambda q, k, v, is_causal: (
        (1 + larger) * attention_reference(q, k, v, is_causal)
    )
    rows = list(board.measure_accuracy(accuracy_task(board, scale=10)))
    assert values(rows, "tensor") == ["o", "dq", "dk", "dv"]
    for row in rows:
        assert fits(row, board.accuracy.section) and row["score_scale"] == 10
        for name in ("error", "error_max"):
            assert 0 < row[name] == pytest.approx(larger, rel=1e-3, abs=1e-4), row
