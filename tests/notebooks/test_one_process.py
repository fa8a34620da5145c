"""Notebooks that measure in one process, through papermill, each at its smallest size."""

from notebook_texts import figures, rows


def test_checkpointing_stores_and_draws_a_row_for_each_strategy(execute):
    asked = {"context": 8, "strategies": "none,block", "steps": 1, "precision": "fp32"}
    notebook, measured = execute("checkpointing", **asked)
    found = rows(measured, "checkpointing", status="ok", n=1, layers=4)
    assert {row["strategy"] for row in found} == {"none", "block"}
    assert figures(notebook) == 1


def test_memory_stores_rows_and_pictures_and_has_recordings_of_a_gpu_alone(execute):
    notebook, measured = execute("memory", context=8, batch=2)
    for section, n in (("memory", 2 * 5), ("memory_block", 1)):
        assert len(rows(measured, section, status="ok")) == n
    assert len(rows(measured, "memory_recording", status="unsupported")) == 2
    pictures = [p.parent.parent.name for p in measured.glob("bulk/*/cpu/*.csv")]
    assert pictures == ["saved"]
    assert figures(notebook) == 0
