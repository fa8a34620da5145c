"""notebooks/attention.ipynb through papermill, at the smallest size."""

from notebook_texts import figures, rows


def test_both_passes_are_stored_with_what_they_save_and_drawn(execute):
    asked = ["-p", "seq_len", 32, "-p", "head_dim", 16, "-p", "calls", 2, "-p", "causal", True]
    notebook, measured = execute("attention", *asked)
    assert {(r["pass"], r["status"], r["n"]) for r in rows(measured, "attention")} == {
        (pass_, "ok", "2") for pass_ in ("forward", "backward")
    }
    saved = {r["tensor"]: int(r["saved_bytes"]) for r in rows(measured, "attention_saved")}
    tensor = 8 * 32 * 16 * 4
    assert saved == {
        "q": tensor, "k": tensor, "v": tensor, "p": 8 * 32 * 32 * 4, "mask": 32 * 32, "other": 0,
    }  # fmt: skip
    assert figures(notebook) == 1
