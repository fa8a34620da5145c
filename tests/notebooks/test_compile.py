"""notebooks/compile.ipynb: what it asks for, and what it measures at the smallest size."""

import contextlib

import pytest
import torch
from inductor_plans import planned
from notebook_cells import committed_keys, fits, load_cells, run_cells, stored_keys

from a2lib.lab import inductor
from a2lib.lab.steps import StepTimes
from a2lib.shapes import Shape

TINY = {"seq_len": 16, "head_dim": 8, "batch": 2, "model": "none"}
QUICK = {"warmup_ms": 0, "rep_ms": 0.01, "min_n": 2, "max_n": 2}

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def attention(configured, monkeypatch, tmp_path):
    """``attention(**parameters)``: the cells, which time quickly and plan what they compile."""
    monkeypatch.setattr(inductor, "prime", lambda device: None)
    monkeypatch.setattr(inductor, "cache_dir", lambda: tmp_path)

    def load(**parameters):
        cells = load_cells("compile", **TINY, **parameters)
        cells.TIMING["cpu"].update(QUICK)
        return cells

    return load


def measured(cells, names=None):
    """Return the rows of the one shape asked for, by (implementation, pass)."""
    (shape,) = cells.shapes
    keys = [
        {"implementation": name, **shape, "pass": pass_}
        for name in names or cells.MAKE
        for pass_ in cells.PASSES
    ]
    with planned():
        rows = list(cells.measure_attention(keys))
    assert len(rows) == len(keys)
    return {(row["implementation"], row["pass"]): {"status": "ok", **row} for row in rows}


def status_of(rows, name):
    return {row["status"] for (implementation, _), row in rows.items() if implementation == name}


# What is asked for


@pytest.mark.parametrize("table", ["compile_attention", "compile_model"])
def test_the_sweeps_ask_for_every_committed_row(monkeypatch, table):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    cells = load_cells("compile", sweep="all")
    tasks = {"compile_attention": cells.attention_tasks, "compile_model": cells.model_tasks}[table]
    keys = [key for task in tasks for key in task]
    assert committed_keys(table) <= stored_keys(table, keys)
    assert len(stored_keys(table, keys)) == len(keys)


def test_several_sizes_and_a_model_are_asked_for_by_name():
    cells = load_cells("compile", seq_len="8,16", head_dim=4, dtype="all", context="8", mode="all")
    assert {(s["seq_len"], s["dtype"]) for s in cells.shapes} == {
        (8, "fp32"),
        (16, "fp32"),
        (8, "bf16"),
        (16, "bf16"),
    }
    assert [task[0]["mode"] for task in cells.model_tasks] == list(cells.MODES)
    assert {key["compile"] for key in cells.model_tasks[0]} == {"none", "blocks"}


# Attention


@pytest.mark.parametrize("written", ["causal", "heads"])
def test_a_compiled_pass_has_what_compiling_took_and_made(attention, written):
    cells = attention(written=written)
    rows = measured(cells)
    section = cells.attentions.section
    assert all(fits(row, section) and row["status"] == "ok" for row in rows.values()), rows
    for pass_ in cells.PASSES:
        compiled, eager = rows["compile", pass_], rows["eager", pass_]
        assert compiled["ms_cold"] > 0 and compiled["ms_warm"] > 0 and compiled["n"] == 2
        assert compiled["attentions"] == (written == "heads")
        assert "ms_cold" not in eager and "attentions" not in eager


def test_a_readers_own_way_is_measured_and_a_wrong_one_is_an_error(attention):
    cells = attention()
    cells.MAKE["mine"] = lambda attend: torch.compile(attend, backend="eager")
    cells.MAKE["wrong"] = lambda attend: lambda q, k, v: 1.1 * attend(q, k, v)
    rows = measured(cells, ["eager", "mine", "wrong"])
    statuses = {name: status_of(rows, name) for name in ("eager", "mine", "wrong")}
    assert statuses == {"eager": {"ok"}, "mine": {"ok"}, "wrong": {"error"}}
    assert "wrong o" in rows["wrong", "forward"]["note"]
    assert rows["mine", "forward"]["ms_cold"] > 0


def test_an_attention_of_the_readers_own_is_held_against_the_truth(attention):
    cells = attention()
    cells.WRITTEN["mine"] = lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    cells.shapes[:] = [{**cells.shapes[0], "written": "mine"}]
    assert measured(cells, ["eager"])["eager", "backward"]["status"] == "ok"
    cells.CAUSAL.add("mine")  # which it is not
    assert measured(cells, ["eager"])["eager", "backward"]["status"] == "error"


# A C++ compiler would take seconds for each kernel; tests/lab/test_inductor.py calls one.
PLANNED = """
measure_whole = measure_attention

def measure_attention(keys):
    from inductor_plans import planned

    with planned():
        yield from measure_whole(keys)
"""


def test_all_cells_run():
    cells = run_cells("compile", {"measure-attention": PLANNED}, **TINY, written="heads")
    frame = cells.attentions.frame().set_index(["implementation", "pass"])
    assert set(frame["status"]) == {"ok"} and len(frame) == 4
    assert frame.loc["compile", "ms_cold"].notna().all()
    assert frame.loc["eager", "ms_cold"].isna().all()
    assert frame.loc["compile", "attentions"].tolist() == [1, 1]
    assert not cells.models.rows() and cells.figure is not None


# Models


def step(forward, loss=2.0):
    """Return the times of a step whose forward takes so long."""
    ms = {"forward": forward, "loss": 1.0, "backward": 2 * forward, "optimizer": 2.0}
    ms |= {"step": sum(ms.values()), "wall": 1 + sum(ms.values())}
    return StepTimes(ms, dict.fromkeys(ms, 0.5), loss)


@pytest.fixture
def played(monkeypatch, replace):
    """``played(**losses)``: the rows of a tiny model in every way, by (way, phase), and the runs as
    (way, steps). Steps take 10, 20, ... ms, the first one of a run 1000 more. A way whose loss is
    None raises; ``model_keys(name, ways)`` may be others."""
    monkeypatch.setattr(inductor, "prime", lambda device: None)

    def measure(name="tiny", ways=("none", "blocks", "model"), **losses):
        cells, calls = load_cells("compile", model="none"), []

        def train(key, folder, n):
            calls.append((key["compile"], n))
            loss = losses.get(key["compile"], 2.0)
            if loss is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            ms = 10.0 * len(calls)
            return cells.Training(step(ms + 1000, loss), [step(ms)] * n, None)

        replace(cells, train=train, uncompiled_loss=lambda key: 2.0)
        rows = list(cells.measure_models(cells.model_keys(name, 16, ways)))
        assert all(fits(row, cells.models.section) for row in rows)
        return {(row["compile"], row["phase"]): {"status": "ok", **row} for row in rows}, calls

    return measure


def test_ways_take_turns_and_both_runs_count(played):
    rows, calls = played()
    assert [way for way, _ in calls] == ["none", "blocks", "model"] * 2
    assert len(rows) == 18 and {row["status"] for row in rows.values()} == {"ok"}
    forward = rows["blocks", "forward"]
    assert (forward["n"], forward["ms_mean"], forward["ms_min"]) == (10, 35, 20)
    assert (forward["ms_cold"], forward["ms_warm"]) == (1020, 1050)
    assert rows["model", "wall"]["ms_cold"] == 1030 + 1 + 2060 + 2 + 1


def test_a_large_graph_is_compiled_once_and_has_as_many_steps(played):
    rows, calls = played("medium", ["model"])
    assert calls == [("model", 10)]
    whole = rows["model", "wall"]
    assert whole["ms_cold"] > 1000 and "ms_warm" not in whole and whole["n"] == 10


def test_a_way_that_fails_or_is_wrong_leaves_the_others(played):
    rows, calls = played(model=None, blocks=2.1)
    assert [way for way, _ in calls] == ["none", "blocks", "model", "none", "blocks"]
    statuses = {way: rows[way, "wall"]["status"] for way in ("none", "blocks", "model")}
    assert statuses == {"none": "ok", "blocks": "error", "model": "oom"}
    assert "uncompiled it is 2" in rows["blocks", "forward"]["note"]


def test_a_size_and_a_way_of_the_readers_own_run_a_real_step(replace):
    cells = load_cells("compile", model="none")
    cells.MODEL_SIZES["mine"] = Shape(16, 16, 1, 2, vocab_size=11)
    cells.WAYS["slow"] = lambda step: None
    cells.WAYS["wrong"] = lambda step: setattr(step, "loss", lambda *given: 2 * cells_loss(*given))
    from a2lib.model import cross_entropy as cells_loss

    replace(cells, STEPS=1, WARMUP=1)
    replace(cells, inductor=Planned)
    rows = list(cells.measure_models(cells.model_keys("mine", 4, ["none"])))
    statuses = {row["compile"]: row.get("status", "ok") for row in rows}
    assert statuses == {"none": "ok", "slow": "ok", "wrong": "error"}
    assert {row["n"] for row in rows if row["compile"] == "slow"} == {2}


class Planned:
    """In the place of lab.inductor where nothing is compiled."""

    empty_folder = staticmethod(contextlib.nullcontext)

    @staticmethod
    def prime(device):
        pass

    @staticmethod
    def caches_in(folder):
        return contextlib.nullcontext()
