"""The cells of notebooks/profile.ipynb at the smallest size, through a worker."""

import json
from dataclasses import asdict

import pytest
import traced_by_hand
from notebook_cells import load_cells
from tables import by, values, where

from a2lib import benchmark, lab
from a2lib.lab import bulk, start_run, trace
from a2lib.lab.steps import StepTimes


def test_a_trace_is_rows_and_pictures(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    ns = load_cells("profile", context="8")
    run = lab.start("profile", vars(ns))
    assert lab.sweep(ns.traces, ns.tasks, ns.measure, run, whole=True, fresh=True) == 0
    rows = by(ns.traces.rows(), "phase")
    assert set(rows) == {"forward", "loss", "backward", "optimizer", "step"}
    assert set(values(rows.values(), "status")) == {"ok"}, rows
    times = ("ms_timer", "ms_traced", "ms_busy", "ms_range", "ms", "ms_p20", "ms_p80", "n")
    shares = ("no_launch_percent", "no_range_percent", "no_class_percent")
    for column in (*ns.traces.key, *times, *shares):
        assert rows["step"][column] != "", column
    assert float(rows["step"]["no_class_percent"]) <= 2
    name = "tiny-8-4-train-step-fp32-eager-none-torch"
    assert ns.picture(ns.asked[0]) == name
    kernels = bulk.read("kernels", "cpu", name, tmp_path)
    assert kernels.run == rows["step"]["run"]
    # Two blocks and the head: 2 * 7 + 1 linear layers, two products of attention each.
    for phase, products in (("forward", 19), ("backward", 38)):
        own = where(kernels.rows, phase=phase, kind="matmul")
        assert sum(values(own, "calls")) == products
        strip = bulk.read("strip", "cpu", f"{name}-{phase}", tmp_path).rows
        assert set(values(strip, "phase")) == {phase}


@pytest.fixture
def traced(tmp_path):
    traced_by_hand.write_nsys(tmp_path / "report.sqlite")
    return trace.from_nsys(tmp_path / "report.sqlite")


def test_each_phase_by_the_gpu_and_by_the_host(traced):
    cells = load_cells("profile")
    (phases,) = cells.phase_times(traced).values()
    assert len(cells.median_step(traced)) == 8
    # From 100 to 280 by four kernels, 160 of them at work, launched in 190 by four calls of 5.
    assert tuple(phases["forward"].values()) == (4, 0.18, 0.16, 0.19, 90.0)
    assert tuple(phases["backward"].values()) == (2, 0.16, 0.15, 0.3, 160.0)
    assert tuple(phases["step"].values())[:4] == (8, 0.865, 0.355, 1)


def test_nsight_systems_traces_the_same_step_in_a_process_of_its_own(tmp_path, monkeypatch, traced):
    """A stand-in gives a report of three phases of one step."""
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    ns = load_cells("profile", context="8", mode="train-step", precision="bf16")
    commands = []

    def under_nsys(command, report):
        commands.append(command)
        assert "." not in report.name
        phases = ("forward", "loss", "backward", "optimizer", "step", "wall")
        times = asdict(StepTimes(dict.fromkeys(phases, 2.0), {}, None))
        said = json.dumps({"status": "ok", "note": "", "steps": [times] * 3})
        return traced, f"Generating report\n{said}\n"

    monkeypatch.setitem(ns.namespace, "under_nsys", under_nsys)
    ns.traces.run = start_run(command="", parameters={}, device="cpu", data=tmp_path)
    case = {**ns.asked[0], "profiler": "nsys"}
    keys = [{**case, "phase": phase} for phase in ("forward", "loss", "step")]
    forward, loss, step = ns.measure(keys)
    assert (forward["ms"], forward["ms_traced"], forward["ms_range"]) == (0.18, 2, 0.19)
    assert loss["status"] == "error" and "no loss" in loss["note"]
    assert step["ms_range"] == 1 and "note" not in step
    [[_, flag, module, *options]] = commands
    assert (flag, module) == ("-m", "a2lib.benchmark")
    monkeypatch.setattr(benchmark, "device_kind", lambda: "cuda")
    asked, config = benchmark.parse(options)
    assert (config.context, config.precision, config.mode) == (8, "bf16", "train-step")
    assert (asked.nvtx, asked.warmup, asked.steps, asked.json) == ("modules", 3, 3, True)
