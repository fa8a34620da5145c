"""notebooks/compile.ipynb: what it asks for, and what it measures at the smallest size."""

import contextlib

import pytest
import torch
from inductor_plans import planned
from notebook_cells import fits, identities, load_cells, published, run_cells
from tables import by

from a2lib.lab import inductor
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
    keys = []
    for name in names or cells.MAKE:
        for pass_ in cells.PASSES:
            keys.append({"implementation": name, **shape, "pass": pass_})
    with planned():
        rows = by(cells.measure_attention(keys), "implementation", "pass")
    assert len(rows) == len(keys)
    return rows


# What is asked for


def test_the_sweeps_ask_for_every_committed_row(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    cells = load_cells("compile", sweep="all")
    assert published(cells.attentions) <= identities(cells.attentions, cells.attention_tasks)
    assert published(cells.models) <= identities(cells.models, cells.model_tasks)


# Attention


@pytest.mark.parametrize("written", ["causal", "heads"])
def test_a_compiled_pass_has_what_compiling_took_and_made(attention, written):
    cells = attention(written=written)
    rows = measured(cells)
    for row in rows.values():
        assert fits(row, cells.attentions.section) and "status" not in row, row
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
    for pass_ in cells.PASSES:
        assert "status" not in rows["eager", pass_] and "status" not in rows["mine", pass_]
        assert rows["wrong", pass_]["status"] == "error"
    assert "wrong o" in rows["wrong", "forward"]["note"]
    assert rows["mine", "forward"]["ms_cold"] > 0


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


def test_a_size_and_a_way_of_the_readers_own_run_a_real_step(replace):
    cells = load_cells("compile", model="none")
    cells.MODEL_SIZES["mine"] = Shape(16, 16, 1, 2, vocab_size=11)
    cells.WAYS["slow"] = lambda step: None
    cells.WAYS["large"] = no_room
    cells.WAYS["wrong"] = lambda step: setattr(step, "loss", lambda *given: 2 * cells_loss(*given))
    from a2lib.model import cross_entropy as cells_loss

    replace(cells, STEPS=1, WARMUP=1)
    replace(cells, inductor=Planned)
    expected = {"none": "ok", "slow": "ok", "large": "oom", "wrong": "error"}
    seen = set()
    for row in cells.measure_models(cells.model_keys("mine", 4, ["none"])):
        assert fits(row, cells.models.section)
        way = row["compile"]
        assert row.get("status", "ok") == expected[way], row
        assert way != "slow" or row["n"] == 2
        seen.add(way)
    assert seen == set(expected)


def no_room(step):
    raise torch.OutOfMemoryError("CUDA out of memory")


class Planned:
    """In the place of lab.inductor where nothing is compiled."""

    empty_folder = staticmethod(contextlib.nullcontext)

    @staticmethod
    def prime(device):
        pass

    @staticmethod
    def caches_in(folder):
        return contextlib.nullcontext()
