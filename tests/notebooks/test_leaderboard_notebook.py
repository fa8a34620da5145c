"""notebooks/leaderboard.ipynb through papermill, with two processes and a tiny model."""

from notebook_texts import figures, rows


def test_a_way_is_stored_and_drawn(execute):
    """The one that does most; the losses of all are compared in tests/parallel."""
    notebook, measured = execute("leaderboard", "-p", "ways", "offloaded", "-p", "rep_ms", 3000)
    (row,) = rows(measured, "leaderboard")
    key = [row[c] for c in ("way", "model", "layers", "backend", "world_size", "dtype", "status")]
    assert key == ["offloaded", "tiny", "4", "gloo", "2", "fp32", "ok"], row
    assert float(row["loss"]) > 0 and float(row["gradient_norm"]) > 0
    assert float(row["ms_ready"]) > float(row["ms"]) > 0
    assert int(row["host_bytes"]) > 0 and row["products_again"] == "0"
    assert figures(notebook) == 1
