"""What the notebook's cells ask for, show and draw."""

import pytest

from a2lib.experiments import ceilings, flash
from a2lib.experiments.flash.shapes import ASKED, PUBLISHED, Parameters
from a2lib.experiments.harness.run import command, data_folder
from a2lib.measure import CEILING, FLASH


@pytest.fixture
def started(on_cpu, capsys):
    """``started(**parameters)`` is a run that stores under its own data folder, on the CPU."""

    def start(**given):
        run = flash.start(flash.check({**vars(Parameters()), **given}))
        assert capsys.readouterr().out
        return run

    return start


def measured(run, *, status="ok", names=PUBLISHED, **given):
    """Rows of 2 ms each for what is asked for."""
    for task in flash.tasks(run.parameters, run.device):
        for name in names:
            for key in task.rows[name]:
                row = {"status": status, "note": "why", "run": run.id}
                if status == "ok":
                    row |= {"ms": 2.0, "ms_p20": 1.0, "ms_p80": 3.0, "n": 5} | given
                run.store(FLASH).put(key | row)


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


def test_rates_are_operations_over_time_beside_the_ceiling(started, capsys):
    run = started(seq_len=1024, heads=4, causal=False, implementations="eager")
    measured(run, names=["eager"])
    key = {"operation": "matmul", "dtype": "bf16", "size": 128}
    row = key | {"status": "ok", "run": run.id, "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 1}
    run.store(CEILING).put(row)
    flash.show_table(run, "TFLOP/s")
    printed = capsys.readouterr().out
    forward = 4 * 4 * 1024**2 * 64 / 2e-3 / 1e12
    for times in (1, 2.5, 3.5):
        assert f"{forward * times:.4g}" in printed
    assert f"{2 * 128**3 / 1e-3 / 1e12:.4g}" in printed


def test_the_ceilings_are_measured_in_every_run_and_their_worker_is_kept(started, capsys):
    run, again = started(sweep="all"), started(sweep="all")
    try:
        flash.measure_ceilings(run)
        again.worker = run.worker
        flash.measure_ceilings(again)
        assert not run.worker.closed
    finally:
        run.worker.close()
    assert capsys.readouterr().out.count("TFLOP/s or TB/s") == 2
    rows = ceilings.CEILINGS.rows(run)
    assert [row["operation"] for row in rows] == ["matmul"] * 3 + ["copy"]
    assert {(row["status"], row["run"]) for row in rows} == {("ok", again.id)}


def test_rows_of_a_cpu_leave_the_committed_data_alone(started, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("A2LIB_DATA")
    monkeypatch.setattr("a2lib.paths.ROOT", tmp_path)
    run = started(seq_len=64, implementations="eager")
    measured(run, names=["eager"])
    flash.say_where(run)
    assert run.data == tmp_path / "build" / "data"
    assert "Rows: build/data/measured/flash/cpu.csv; run " in capsys.readouterr().out
    assert (tmp_path / "build" / "data" / "measured" / "runs.csv").is_file()
    assert not (tmp_path / "data").exists()
    assert data_folder("cuda") == tmp_path / "data"
