"""What the notebook's cells print, draw and record."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from a2lib.experiments import ceilings, flash
from a2lib.experiments.flash import view
from a2lib.experiments.flash.shapes import ASKED, PUBLISHED, Parameters, Shape
from a2lib.experiments.harness.run import command, data_folder
from a2lib.measure import CEILING, FLASH, DeviceBusy, DeviceLock, Store
from a2lib.theory.attention import PASSES


@pytest.fixture
def started(tmp_path, monkeypatch, capsys):
    """``started(**parameters)`` is a run that stores under its own data folder, on the CPU."""
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(**given):
        return flash.start(Parameters(**given))

    return start


def measured(run, *, status="ok", names=PUBLISHED, **given):
    for shape in run.parameters.shapes(run.device):
        for name in names:
            for pass_ in run.parameters.chosen_passes():
                row = {"status": status, "note": "why", "run": run.id}
                if status == "ok":
                    row |= {"ms": 2.0, "ms_p20": 1.0, "ms_p80": 3.0, "n": 5, "peak_bytes": 2**20}
                    row |= given
                run.store(FLASH).put(shape.key(name, pass_) | row)


def test_the_command_repeats_the_run():
    given = Parameters(seq_len=65536, causal=False, implementations="a2lib,eager", time_limit_s=60)
    assert command("flash", given) == (
        "papermill notebooks/flash.ipynb -p seq_len 65536 -p causal False"
        " -p implementations a2lib,eager -p time_limit_s 60"
    )
    assert command("flash", Parameters()) == "papermill notebooks/flash.ipynb"


def test_the_asked_backward_is_in_the_handouts_sweep_alone_and_its_forward_is_ours():
    found = {
        (task.spec["shape"]["heads"], key["pass"])
        for task in flash.tasks(Parameters(sweep="all"), "cuda")
        for key in task.rows.get(ASKED, ())
    }
    assert found == {(1, "backward"), (1, "end_to_end")}
    given = Parameters(implementations=ASKED, passes="forward")
    assert not sum(task.size for task in flash.tasks(given, "cuda"))


def test_the_cpu_is_labelled(started, capsys):
    started()
    assert "CPU: tiny sizes" in capsys.readouterr().out
    run = started(seq_len=4096)
    assert "tiny" not in capsys.readouterr().out
    assert run.slug == "cpu"


@pytest.mark.parametrize(
    "status, sweep",
    [*(("ok", sweep) for sweep in ("shape", "handout", "leaderboard", "fa3", "all"))]
    + [("oom", "shape"), ("oom", "handout")],
)
def test_tables_and_figure_of_every_sweep(started, capsys, sweep, status):
    run = started(sweep=sweep, implementations=",".join(PUBLISHED))
    measured(run, status=status)
    capsys.readouterr()
    for quantity in view.QUANTITIES:
        flash.show_table(run, quantity)
    printed = capsys.readouterr().out
    assert all(name in printed for name in PUBLISHED)
    assert ("median time, ms" in printed) and (status == "ok" or "oom" in printed)
    axes = [axis for axis in flash.draw(run).axes if axis.axison]
    assert len(axes) == {"shape": 2, "handout": 8, "leaderboard": 1, "fa3": 4, "all": 12}[sweep]
    if status == "ok":
        assert all(axis.lines or axis.patches for axis in axes)


def test_the_gpus_time_and_the_hosts_are_apart(started, capsys):
    run = started(implementations="eager,flex")
    measured(run, names=["eager"], ms_graph=0.0625, ms_host=0.875, note="")
    measured(run, names=["flex"], ms_host=0.375, note="no graph: out of memory")
    capsys.readouterr()
    flash.show_table(run, "GPU ms")
    printed = capsys.readouterr().out
    assert re.search(r"eager +0\.0625 +0\.0625 +0\.0625", printed)
    assert re.search(r"flex +- +- +-", printed)
    assert "Rows without a graph:\n  flex: ok, 3 rows: no graph: out of memory" in printed
    flash.show_table(run, "host ms")
    printed = capsys.readouterr().out
    assert re.search(r"eager +0\.875", printed) and re.search(r"flex +0\.375", printed)


@pytest.mark.parametrize("quantity", ["GPU ms", "host ms"])
def test_on_a_cpu_there_is_one_time(started, capsys, quantity):
    run = started(implementations="eager")
    measured(run, names=["eager"])
    capsys.readouterr()
    flash.show_table(run, quantity)
    assert capsys.readouterr().out.endswith("is measured on a GPU alone.\n")


def test_the_clock_stands_beside_a_ceiling(started, capsys):
    row = {"operation": "matmul", "dtype": "bf16", "size": 1000, "status": "ok", "ms": 1.0}
    assert ceilings.line(row | {"sm_mhz": 1500}).endswith("2 TFLOP/s, 1500 MHz")
    assert ceilings.line(row | {"sm_mhz": None}).endswith("2 TFLOP/s")


def test_tables_without_rows(started, capsys):
    run = started()
    capsys.readouterr()
    flash.show_table(run, "ms")
    assert capsys.readouterr().out.startswith("Nothing here")
    flash.draw(run)


def test_rates_are_operations_over_time_beside_the_ceiling(started, capsys):
    run = started(seq_len=1024, heads=4, causal=False, implementations="eager")
    measured(run, names=["eager"])
    row = {"operation": "matmul", "dtype": "fp32", "size": 1000, "status": "ok", "run": run.id}
    Store(CEILING, "cpu").put(row | {"ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 1})
    capsys.readouterr()
    flash.show_table(run, "TFLOP/s")
    printed = capsys.readouterr().out
    forward = 4 * 4 * 1024**2 * 64 / 2e-3 / 1e12
    for times in (1, 2.5, 3.5):
        assert f"{forward * times:.4g}" in printed
    assert "fp32 1000^3 matmul: 2 TFLOP/s" in printed


def test_only_what_was_asked_for_is_shown(started):
    run = started(seq_len=64, implementations="eager,tiled", passes="forward")
    measured(run, names=["eager", "tiled", "flex"])
    other = dataclasses.replace(run, parameters=Parameters(seq_len=96, implementations="eager"))
    measured(other, names=["eager"])
    shown = {(row["implementation"], row["pass"], row["seq_len"]) for row in flash.rows(run)}
    assert shown == {("eager", "forward", "64"), ("tiled", "forward", "64")}


def test_what_is_left_is_said_with_the_command_to_go_on(started, capsys):
    run = started(sweep="fa3", implementations="eager", time_limit_s=1)
    run.until = 0.0
    flash.sweep(run)
    assert run.left == len(run.parameters.shapes("cpu")) * len(PASSES)
    flash.say_where(run)
    printed = capsys.readouterr().out
    assert f"{run.left} rows are left" in printed
    assert (
        printed.count("papermill notebooks/flash.ipynb -p implementations eager -p sweep fa3") >= 2
    )
    assert "Rows: none; run " in printed and str(run.data) not in printed


def test_the_ceilings_are_measured_and_their_worker_is_kept(started, capsys):
    run = started()
    try:
        flash.measure_ceilings(run)
        assert not run.worker.closed
    finally:
        run.worker.close()
    printed = capsys.readouterr().out
    assert printed.count("TFLOP/s") == 3 and printed.count("GB/s, read and write") == 1
    measured = [{c: row[c] for c in CEILING.key} for row in run.store(CEILING).rows()]
    asked = [{**key, "size": str(key["size"])} for key in ceilings.keys("cpu")]
    assert sorted(map(str, measured)) == sorted(map(str, asked))


def test_shapes_come_back_from_rows(started):
    run = started(seq_len=48, causal=False, dtype="bf16")
    measured(run, names=["eager"])
    assert {view.shape_of(row) for row in run.store(FLASH).rows()} == {
        Shape("bf16", 1, 1, 48, 64, False)
    }


def test_rows_of_a_cpu_leave_the_committed_data_alone(started, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("A2LIB_DATA")
    monkeypatch.setattr("a2lib.paths.ROOT", tmp_path)
    run = started(seq_len=64)
    measured(run, names=["eager"])
    flash.say_where(run)
    assert run.data == tmp_path / "build" / "data"
    assert "Rows: build/data/measured/flash/cpu.csv; run " in capsys.readouterr().out
    assert (tmp_path / "build" / "data" / "measured" / "runs.csv").is_file()
    assert not (tmp_path / "data").exists()
    assert data_folder("cuda") == tmp_path / "data"


STEPS = [
    flash.measure_ceilings, flash.compile_ahead, flash.sweep, flash.measure_protocols,
    flash.measure_accuracy, flash.count,
]  # fmt: skip


@pytest.fixture
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_step_that_measures_is_refused_on_a_busy_device(step, locks):
    with DeviceLock("cpu").held("run a"), pytest.raises(DeviceBusy, match="run a, since"):
        step(SimpleNamespace(device="cpu", id="b", parameters=None))
