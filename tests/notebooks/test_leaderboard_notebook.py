"""notebooks/leaderboard.ipynb through papermill, with two processes and a tiny model."""

import pytest
from notebook_texts import figures, rows

WAYS = ("fused_head", "offloaded")  # PyTorch's wrapper, and ours with all that it may keep


def test_ways_are_stored_with_equal_losses_and_drawn(execute):
    asked = ["-p", "ways", ",".join(WAYS), "-p", "rep_ms", 3000]
    notebook, measured = execute("leaderboard", *asked)
    found = {row["way"]: row for row in rows(measured, "leaderboard")}
    assert set(found) == set(WAYS)
    first = found["fused_head"]
    for row in found.values():
        key = [row[c] for c in ("model", "layers", "backend", "world_size", "dtype", "status")]
        assert key == ["tiny", "4", "gloo", "2", "fp32", "ok"], row
        assert row["loss"] == first["loss"]
        norm = float(row["gradient_norm"])
        assert norm == pytest.approx(float(first["gradient_norm"]), rel=1e-4)
        assert float(row["ms_ready"]) > float(row["ms"]) > 0
        assert (int(row["host_bytes"]) > 0) is (row["way"] == "offloaded")
    assert [found[way]["products_again"] for way in WAYS] == ["20", "0"]
    assert figures(notebook) == 1
