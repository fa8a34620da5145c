"""Protocols at one shape: what is asked for, what becomes a row, and that it was right."""

from unittest.mock import Mock

import pytest
import torch
from experiments.flash.test_comparison import good

from a2lib.attention import attention_reference, tiles
from a2lib.experiments.flash import peers, protocols
from a2lib.experiments.flash.shapes import Parameters
from a2lib.lab import Timing
from a2lib.lab.sustained import Second

TINY = Parameters(sweep="leaderboard")


def task(protocol):
    return next(t for t in protocols.tasks(TINY, "cpu") if t.spec["protocol"] == protocol)


@pytest.fixture
def measured(put):
    return lambda protocol: put(protocols.measure, task(protocol))


def test_burst_is_a_row_for_each_with_its_mean(measured):
    rows = measured("burst")
    assert [row["implementation"] for row in rows] == ["eager", "sdpa_flash"]
    for row in rows:
        assert row["status"] == "ok" and row["second"] == 0 and row["n"] > 0
        assert row["ms"] > 0 and row["ms_mean"] > 0 and row["sm_mhz"] is None


def test_sustained_is_a_row_for_each_second_and_the_first_is_stored_last(measured, monkeypatch):
    asked = {}

    def seconds_of(call, **given):
        asked.update(given)
        call()
        return [
            Second(s, Timing.from_samples([1.0 + s, 2.0 + s], mhz=[1900 - s]), 600.5)
            for s in (0, 1, 3)
        ]

    monkeypatch.setattr(protocols, "seconds_of", seconds_of)
    rows = measured("sustained")
    assert [row["second"] for row in rows] == [3, 1, 0]
    assert rows[0]["ms"] == rows[0]["ms_mean"] == 4.5 and rows[0]["sm_mhz"] == 1897
    assert rows[0]["power_w"] == 600.5 and asked["n_seconds"] == protocols.N_SECONDS


@pytest.mark.parametrize("protocol", ["burst", "sustained"])
def test_what_is_wrong_gets_no_time(measured, monkeypatch, protocol):
    wrong = {"eager": lambda q, k, v: attention_reference(q, k, v, False), "sdpa_flash": good}
    monkeypatch.setattr(peers, "build", lambda name, shape, device: wrong[name])
    rows = {row["implementation"]: row for row in measured(protocol)}
    assert rows["eager"]["status"] == "error" and "wrong o" in rows["eager"]["note"]
    assert rows["eager"]["second"] == 0 and "ms" not in rows["eager"]
    assert protocol == "sustained" or rows["sdpa_flash"]["status"] == "ok"


def test_what_fails_while_timed_is_a_row(measured, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(protocols, "seconds_of", Mock(side_effect=error))
    (row,) = measured("sustained")
    assert row["status"] == "oom" and row["second"] == 0


def test_in_a_fixed_order_is_what_is_checked_and_timed(measured, monkeypatch):
    asked = []

    def build(name, shape, device):
        def forward(q, k, v):
            asked.append(torch.are_deterministic_algorithms_enabled())
            assert not torch.utils.deterministic.fill_uninitialized_memory
            return good(q, k, v)

        return forward

    monkeypatch.setattr(peers, "build", build)
    rows = measured("fixed_order")
    assert [row["status"] for row in rows] == ["ok", "ok"] and all(asked) and len(asked) > 4
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_first_lengths_are_those_of_the_same_form_and_of_another():
    (shape,) = protocols.sweep_shapes("leaderboard", tiny=False)
    n, same, other = (int(part * shape.seq_len) for part in protocols.FIRST_LENGTHS)

    def form(n):
        return tiles.hopper_forward(shape.head_dim, n, shape.heads, shape.causal)

    assert form(n) == form(same) != form(other) and same % 64 and other % 64


def test_a_first_call_that_takes_too_long_is_a_row(measured, monkeypatch):
    monkeypatch.setattr(protocols, "FIRST_S", 0.01)
    (row,) = measured("first")
    assert row["status"] == "error" and "did not end" in row["note"]


@pytest.mark.parametrize("protocol", ["host", "host_compiled"])
def test_the_host_is_timed_in_turns_with_and_without_gradients(put, monkeypatch, protocol):
    """With a clock of the host that a GPU would have; what is compiled is compiled whole."""
    monkeypatch.setitem(protocols.OTHERS["cpu"], protocol, ("eager", "sdpa_flash"))
    monkeypatch.setattr(protocols, "HOST_LENGTH", 32)
    monkeypatch.setattr(protocols, "HOST_TURNS", 3)
    turns, compiled = [], []

    def host(_, call, n):
        made = call()
        made = made if isinstance(made, torch.Tensor) else made[0]
        turns.append((made.requires_grad, made.shape[1]))
        return len(turns)

    monkeypatch.setattr(protocols.Clock, "host", host)
    monkeypatch.setattr(torch, "compile", lambda fn, **how: compiled.append(how) or fn)
    tasks = [t for t in protocols.tasks(TINY, "cpu") if t.spec["protocol"] == protocol]
    rows = [row for made in tasks for row in put(protocols.measure, made)]
    assert [(r["pass"], r["implementation"], r["heads"], r["ms"]) for r in rows] == [
        (pass_, name, 1, n * 3 * 2 - 3 + ahead)
        for n, pass_ in enumerate(("end_to_end", "forward"), 1)
        for ahead, name in enumerate(("eager", "sdpa_flash"))
    ]
    assert set(turns) == {(False, 1)}
    assert compiled == [{"fullgraph": True}] * (4 if protocol == "host_compiled" else 0)


@pytest.mark.parametrize("name", ["eager", "sdpa_flash"])
def test_the_board_sums_and_differentiates_three_dimensions(monkeypatch, name):
    made, real = [], torch.randn

    def randn(*sizes, **options):
        made.append(real(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    shape = protocols.Shape(**task("board").spec["shape"])
    call = protocols.board_call(name, shape, "cpu", 0)
    qkv, do = made
    assert qkv.shape == (3, 2, 256, 64) and do.shape == (2, 256, 64) and qkv.grad is None
    call()
    q, k, v = (x[None].double() for x in qkv.detach())
    exact = torch.stack([q, k, v]).requires_grad_()
    attention_reference(*exact.unbind(), True).sum().backward()
    right = exact.grad.squeeze(1)
    assert (qkv.grad - right).norm() < 0.02 * right.norm()


@pytest.mark.gpu
def test_every_protocol_on_the_gpu(put, monkeypatch, configured):
    monkeypatch.setattr(protocols, "BOARD_MS", {"warmup": 10, "rep": 100})
    monkeypatch.setitem(protocols.SECOND_S, "cuda", 0.05)
    monkeypatch.setitem(protocols.IDLE_S, "cuda", 0.1)
    shape = {"dtype": "bf16", "batch": 1, "heads": 2, "seq_len": 512, "head_dim": 64}
    found = []
    for made in protocols.tasks(TINY, "cuda"):
        made.spec["shape"] = {**shape, "causal": True}
        found += put(protocols.measure, made, "cuda")
        assert not put.raised
    assert all(row["status"] == "ok" and row["ms_mean"] for row in found), found
    kinds = {(row["protocol"], row["implementation"]) for row in found}
    assert len(kinds) == 3 + 3 + 4 + 2 + 3 + 2 + 2
