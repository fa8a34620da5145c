"""notebooks/collectives.ipynb through papermill, with two processes and one size."""

from notebook_texts import figures, rows

from a2lib.theory.latency import OPERATIONS


def test_each_operation_is_stored_and_drawn(execute):
    asked = ["-p", "operations", ",".join(OPERATIONS)]
    notebook, measured = execute("collectives", *asked)
    found = rows(measured, "collectives")
    assert [row["operation"] for row in found] == sorted(OPERATIONS)
    for row in found:
        key = [row[c] for c in ("backend", "world_size", "dtype", "size", "status")]
        assert key == ["gloo", "2", "fp32", str(2**20), "ok"]
        columns = ("ms_rank_min", "ms_rank_median", "ms_rank_max")
        times = [float(row[column]) for column in columns]
        assert times == sorted(times) and 0 < times[0] and times[-1] <= float(row["ms_p80"])
        assert row["ms_queued"] == "" and row["conditions"].endswith("cores") and int(row["n"]) >= 5
    assert figures(notebook) == 1
