"""The cells of notebooks/profile.ipynb at the smallest size, through a worker."""

from notebook_cells import load_cells

from a2lib import lab
from a2lib.lab import bulk


def test_a_trace_is_rows_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    ns = load_cells("profile", context="8")
    run = lab.start("profile", vars(ns))
    assert lab.sweep(ns.traces, ns.tasks, ns.measure, run, whole=True, fresh=True) == 0
    rows = {row["phase"]: row for row in ns.traces.rows()}
    assert set(rows) == {"forward", "loss", "backward", "optimizer", "step"}
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    filled = {column for column, value in rows["step"].items() if value}
    values = {"ms_timer", "ms_traced", "ms_busy", "ms_range", "ms", "ms_p20", "ms_p80", "n"}
    shares = {"no_launch_percent", "no_range_percent", "no_class_percent"}
    assert filled >= {*ns.traces.key, *values, *shares}
    assert float(rows["step"]["no_class_percent"]) <= 2
    name = "tiny-8-4-train-step-fp32-eager-none-torch"
    assert ns.picture(ns.asked[0]) == name
    kernels = bulk.read("kernels", "cpu", name, tmp_path)
    assert kernels.run == rows["step"]["run"]
    # Two blocks and the head: 2 * 7 + 1 linear layers, two products of attention each.
    for phase, products in (("forward", 19), ("backward", 38)):
        own = [row for row in kernels.rows if (row["phase"], row["kind"]) == (phase, "matmul")]
        assert sum(row["calls"] for row in own) == products
    for phase in ("forward", "backward"):
        strip = bulk.read("strip", "cpu", f"{name}-{phase}", tmp_path).rows
        assert {row["phase"] for row in strip} == {phase}
