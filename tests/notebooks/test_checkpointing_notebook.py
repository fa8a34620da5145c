"""notebooks/checkpointing.ipynb through papermill, at the smallest size."""

from notebook_texts import figures, rows


def test_a_row_for_each_strategy_is_stored_and_drawn(execute):
    asked = ["-p", "context", 8, "-p", "strategies", "none,block", "-p", "steps", 1]
    notebook, measured = execute("checkpointing", *asked, "-p", "precision", "fp32")
    found = rows(measured, "checkpointing")
    assert {(r["strategy"], r["status"], r["n"], r["layers"]) for r in found} == {
        ("none", "ok", "1", "4"), ("block", "ok", "1", "4"),
    }  # fmt: skip
    assert figures(notebook) == 1
