"""Notebooks that measure in two processes, through papermill, each at its smallest size."""

from notebook_texts import figures, rows

from a2lib.theory.latency import OPERATIONS


def test_collectives_stores_and_draws_each_operation(execute):
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


def test_leaderboard_stores_and_draws_a_way(execute):
    """The one that does most; the losses of all are compared in tests/parallel."""
    notebook, measured = execute("leaderboard", "-p", "ways", "offloaded", "-p", "rep_ms", 3000)
    (row,) = rows(measured, "leaderboard")
    key = [row[c] for c in ("way", "model", "layers", "backend", "world_size", "dtype", "status")]
    assert key == ["offloaded", "tiny", "4", "gloo", "2", "fp32", "ok"], row
    assert float(row["loss"]) > 0 and float(row["gradient_norm"]) > 0
    assert float(row["ms_ready"]) > float(row["ms"]) > 0
    assert int(row["host_bytes"]) > 0 and row["products_again"] == "0"
    assert figures(notebook) == 1


def test_parallelism_stores_and_draws_each_pass_together_and_apart(execute):
    sizes = {"tokens": 16, "d_model": 16, "d_ff": 32, "layers": 2}
    asked = (word for name in sizes for word in ("-p", name, sizes[name]))
    notebook, measured = execute("parallelism", *asked)
    found = rows(measured, "parallelism")
    passes = ("forward", "backward", "end_to_end")
    assert {(r["scheme"], r["mesh"], r["pass"]) for r in found} == {
        (*one, pass_) for one in (("dp", "2x1"), ("fsdp", "2x1"), ("tp", "1x2")) for pass_ in passes
    }
    for row in found:
        key = [row[c] for c in ("backend", "world_size", "dtype", "d_model", "d_ff", "status")]
        assert key == ["gloo", "2", "fp32", "16", "32", "ok"], row
        assert float(row["ms_without"]) > 0 and int(row["n"]) >= 5
        sends = (row["scheme"], row["pass"]) != ("dp", "forward")
        assert bool(row["ms_communication"]) is sends and row["ms_data"] == ""
        assert row["conditions"].endswith("cores")
    assert figures(notebook) == 1
