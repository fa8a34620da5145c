"""Notebooks that measure in two processes, through papermill, each at its smallest size."""

from notebook_texts import figures, rows

from a2lib.theory.latency import OPERATIONS

BY_GLOO = {"backend": "gloo", "world_size": 2, "status": "ok"}


def test_collectives_stores_and_draws_each_operation(execute):
    notebook, measured = execute("collectives", operations=",".join(OPERATIONS))
    found = rows(measured, "collectives", **BY_GLOO, dtype="fp32", size=2**20, ms_queued="")
    assert [row["operation"] for row in found] == sorted(OPERATIONS)
    for row in found:
        columns = ("ms_rank_min", "ms_rank_median", "ms_rank_max", "ms_p80")
        times = [float(row[column]) for column in columns]
        assert times == sorted(times) and times[0] > 0
        assert row["conditions"].endswith("cores") and int(row["n"]) >= 5
    assert figures(notebook) == 1
