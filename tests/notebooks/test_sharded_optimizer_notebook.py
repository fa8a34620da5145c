"""notebooks/sharded_optimizer.ipynb through papermill, with two processes."""

import csv

import pytest
from notebook_texts import texts

from a2lib.experiments.data_parallel.turns import FEWEST, TURNS

WAYS = {("plain", "bucketed"), ("sharded", "bucketed"), ("plain", "torch_ddp"),
        ("zero", "torch_ddp")}  # fmt: skip


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("sharded_optimizer", "-p", "context", "8")


@pytest.fixture(scope="module")
def rows(executed):
    """The rows of a section, by the name of its table."""

    def read(section):
        with open(executed[1] / section / "cpu.csv", newline="") as file:
            return list(csv.DictReader(file))

    return read


def test_times_are_stored_under_their_run(executed, rows):
    with open(executed[1] / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    times = rows("sharded_optimizer")
    assert {(row["optimizer"], row["wrapper"]) for row in times} == WAYS
    for row in times:
        columns = ("model", "context", "backend", "world_size", "status", "note", "run")
        assert [row[c] for c in columns] == ["tiny", "8", "gloo", "2", "ok", "", run["run"]]
        assert int(row["n"]) >= TURNS * FEWEST
        assert float(row["ms"]) > 0 and float(row["ms_without"]) > 0 and row["ms_host"] == ""
        assert float(row["ms_optimizer"]) > 0


def test_memory_has_every_rank_at_every_moment_and_the_bytes_that_travel(rows):
    found = {
        (r["optimizer"], r["wrapper"], r["moment"], int(r["on_rank"])): r
        for r in rows("sharded_optimizer_memory")
    }
    assert len(found) == len(WAYS) * 4 * 2
    assert {(r["status"], r["note"]) for r in found.values()} == {("ok", "")}
    for way in WAYS:
        states = [int(found[*way, "after", rank]["optimizer_bytes"]) for rank in (0, 1)]
        params = int(found[*way, "init", 0]["parameter_bytes"])
        assert found[*way, "init", 0]["optimizer_bytes"] == "0"
        assert int(found[*way, "before", 1]["gradient_bytes"]) == params
        # Two moments, and a counter of four bytes for each of 21 tensors.
        whole = 2 * params + 4 * 21
        if way[0] == "plain":
            assert states == [whole, whole]
        else:
            assert sum(states) == whole and max(states) < 0.51 * whole
        step = found[*way, "step", 0]
        assert int(step["reduced_bytes"]) == pytest.approx(params, rel=0.01)
        exchanged = int(step["gathered_bytes"]) + int(step["broadcast_bytes"])
        # PyTorch's wrapper broadcasts buffers as well.
        least = 0 if way[0] == "plain" else params
        assert least <= exchanged <= 1.02 * least + 1024


def test_it_prints_its_tables_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "tiny launched, fp32, eager: batch 2, context 8, 2 ranks of gloo" in printed
    assert "memory of tiny launched, fp32, eager, MB" in printed
    assert "measured/sharded_optimizer/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
