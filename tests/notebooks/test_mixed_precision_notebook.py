"""notebooks/mixed_precision.ipynb through papermill, as a reader runs it, at the smallest size."""

from notebook_texts import figures, rows, texts


def test_every_row_is_stored_and_each_sum_is_what_was_predicted(execute):
    notebook, measured = execute("mixed_precision", "-p", "terms", 50, "-p", "features", 16)
    for section, n in (("accumulation", 7), ("autocast_dtypes", 39), ("layernorm", 137)):
        found = rows(measured, section)
        assert len(found) == n and {row["status"] for row in found} == {"ok"}
    (sums,) = (text for text in texts(notebook) if "off by" in text)
    assert sums.count(" yes ") == 7
    assert figures(notebook) == 1
