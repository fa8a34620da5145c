"""notebooks/compile.ipynb through papermill, at the smallest size."""

import pytest
from notebook_texts import figures, rows

ASKED = ["-p", "seq_len", "8", "-p", "head_dim", "4", "-p", "batch", "1", "-p", "model", "none"]


@pytest.mark.slow
def test_attention_is_stored_with_what_was_compiled(execute):
    """A whole model would take a minute."""
    # Seconds of the C++ compiler for each empty cache, which are measured and not tested.
    notebook, measured = execute("compile", *ASKED)
    found = rows(measured, "compile_attention")
    assert {(r["implementation"], r["pass"], r["status"]) for r in found} == {
        (name, pass_, "ok") for name in ("eager", "compile") for pass_ in ("forward", "backward")
    }
    assert {(r["written"], r["seq_len"], r["head_dim"]) for r in found} == {("plain", "8", "4")}
    made = {r["pass"]: r for r in found if r["implementation"] == "compile"}
    assert [made[p]["kernels_called"] for p in ("forward", "backward")] == ["1", "1"]
    assert [made[p]["library_calls"] for p in ("forward", "backward")] == ["2", "4"]
    assert not list(measured.glob("compile_model/*.csv"))
    assert figures(notebook) == 1
