"""What the notebook's cells ask for, show and draw."""

from a2lib.experiments import ceilings, flash
from a2lib.experiments.flash.shapes import Parameters
from a2lib.lab import CEILING, FLASH


def measured(run, name):
    """Rows of 2 ms each for what is asked for."""
    row = {"status": "ok", "run": run.id, "ms": 2.0, "ms_p20": 1.0, "ms_p80": 3.0, "n": 5}
    for task in flash.tasks(run.parameters, run.device):
        for key in task.rows[name]:
            run.store(FLASH).put(key | row)


def test_rates_are_operations_over_time_beside_the_ceiling(on_cpu, capsys):
    given = {"seq_len": 1024, "heads": 4, "causal": False, "implementations": "eager"}
    run = flash.start(Parameters(**given))
    measured(run, "eager")
    key = {"operation": "matmul", "dtype": "bf16", "size": 128}
    row = key | {"status": "ok", "run": run.id, "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 1}
    run.store(CEILING).put(row)
    capsys.readouterr()
    flash.show_table(run, "TFLOP/s")
    printed = capsys.readouterr().out
    forward = 4 * 4 * 1024**2 * 64 / 2e-3 / 1e12
    for times in (1, 2.5, 3.5):
        assert f"{forward * times:.4g}" in printed
    assert f"{2 * 128**3 / 1e-3 / 1e12:.4g}" in printed


def test_the_ceilings_are_measured_in_every_run_and_their_worker_is_kept(on_cpu, capsys):
    run, again = (flash.start(Parameters(sweep="all")) for _ in range(2))
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
