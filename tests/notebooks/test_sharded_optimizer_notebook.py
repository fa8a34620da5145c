"""notebooks/sharded_optimizer.ipynb through papermill, with two processes."""

import pytest
from notebook_texts import figures, rows

from a2lib.experiments.data_parallel.times import FEWEST

WAYS = {("plain", "bucketed"), ("sharded", "bucketed"), ("plain", "torch_ddp"),
        ("zero", "torch_ddp")}  # fmt: skip


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("sharded_optimizer", "-p", "context", "8")


def test_times_are_stored(executed):
    found = rows(executed[1], "sharded_optimizer")
    assert {(row["optimizer"], row["wrapper"]) for row in found} == WAYS
    for row in found:
        columns = ("model", "context", "backend", "world_size", "status", "note")
        assert [row[c] for c in columns] == ["tiny", "8", "gloo", "2", "ok", ""]
        assert int(row["n"]) >= FEWEST and row["ms_host"] == ""
        assert all(float(row[c]) > 0 for c in ("ms", "ms_without", "ms_optimizer"))


def test_memory_has_every_rank_at_every_moment_and_the_bytes_that_travel(executed):
    notebook, measured = executed
    found = {
        (r["optimizer"], r["wrapper"], r["moment"], int(r["on_rank"])): r
        for r in rows(measured, "sharded_optimizer_memory")
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
    assert figures(notebook) == 1
