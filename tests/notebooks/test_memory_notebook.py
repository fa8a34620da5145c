"""notebooks/memory.ipynb through papermill, at the smallest size."""

from notebook_texts import figures, rows


def test_rows_and_pictures_are_stored_and_the_recording_is_drawn(execute):
    notebook, measured = execute("memory", "-p", "context", 8, "-p", "batch", 2)
    for section, n in (("memory", 2 * 5), ("memory_recording", 2), ("memory_block", 1)):
        found = rows(measured, section)
        assert len(found) == n and {row["status"] for row in found} == {"ok"}
    pictures = sorted(p.parent.parent.name for p in measured.glob("bulk/*/cpu/*.csv"))
    assert pictures == ["largest"] * 2 + ["lines"] * 2 + ["memory"] * 2 + ["saved"]
    assert figures(notebook) == 1
