"""Notebooks that measure in one process, through papermill, each at its smallest size."""

import pytest
from notebook_texts import figures, rows


@pytest.mark.slow
def test_compile_stores_attention_with_what_was_compiled(execute):
    """A whole model would take a minute."""
    # Seconds of the C++ compiler for each empty cache, which are measured and not tested.
    notebook, measured = execute("compile", seq_len=8, head_dim=4, batch=1, model="none")
    cells = {"written": "plain", "seq_len": 8, "head_dim": 4, "status": "ok"}
    found = rows(measured, "compile_attention", **cells)
    calls = {
        (r["implementation"], r["pass"]): (r["kernels_called"], r["library_calls"]) for r in found
    }
    of_compile = {("compile", "forward"): ("1", "2"), ("compile", "backward"): ("1", "4")}
    assert calls == of_compile | {("eager", p): ("", "") for p in ("forward", "backward")}
    assert not list(measured.glob("compile_model/*.csv"))
    assert figures(notebook) == 1
