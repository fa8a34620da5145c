"""notebooks/profile.ipynb through papermill, at the smallest size: a trace by torch.profiler."""

import pytest
from notebook_texts import figures, rows, texts

from a2lib.measure import bulk

pytestmark = pytest.mark.slow


def test_a_trace_is_stored_shown_and_drawn(execute):
    notebook, measured = execute("profile", "-p", "context", 8)
    found = {row["phase"]: row for row in rows(measured, "profile")}
    assert set(found) == {"forward", "loss", "backward", "optimizer", "step"}
    assert {(r["status"], r["profiler"], r["n"]) for r in found.values()} == {("ok", "torch", "3")}
    assert float(found["step"]["no_class_percent"]) <= 2
    name = "tiny-8-4-train-step-fp32-eager-none-torch"
    kernels = bulk.read("kernels", "cpu", name, measured.parent)
    assert kernels.run == found["step"]["run"]
    # Two blocks and the head: 2 * 7 + 1 linear layers, two products of attention each.
    products = {p: sum(r["calls"] for r in kernels.rows if (r["phase"], r["kind"]) == (p, "matmul"))
                for p in ("forward", "backward")}  # fmt: skip
    assert products == {"forward": 19, "backward": 38}
    assert "what takes the most time" in "".join(texts(notebook)) and figures(notebook) == 1
