"""What a worker stores: by value on results made by hand, and at the smallest size. And what the
sweeps ask for."""

import statistics
import threading
from types import SimpleNamespace

import pytest

from a2lib.benchmark import Result, StepTimes
from a2lib.benchmark.config import least_bytes
from a2lib.experiments import benchmark
from a2lib.experiments.benchmark import configurations, handlers
from a2lib.experiments.benchmark.configurations import Parameters
from a2lib.experiments.steps import Configuration
from a2lib.lab import BENCHMARK, BENCHMARK_FIRST, BENCHMARK_POWER, BENCHMARK_STEPS, device
from a2lib.lab.failures import LostContext
from a2lib.theory import transformer

TINY = Configuration("tiny", 16)
EVERYTHING = Parameters(sweep="all")


def task_of(configuration, warmup=1, steps=3):
    given = SimpleNamespace(warmup=warmup, steps=steps, configurations=lambda _: [configuration])
    (task,) = benchmark.table_tasks(given, "cpu")
    return task


def step(forward, optimizer=2.0, **other):
    ms = {"forward": forward, "loss": 1.0, "backward": 2 * forward, "optimizer": optimizer}
    host = dict.fromkeys(ms, 0.5)
    return StepTimes(ms, host, sum(ms.values()), 1 + sum(ms.values()), **other)


def played(monkeypatch, **given):
    """The benchmark ends as given; the calls it got."""
    calls = []

    def run(config, before_step=None):
        calls.append(config)
        if before_step is not None:
            for i in range(len(given["steps"]) + (given.get("status", "ok") == "ok")):
                before_step(i)
        return Result(config, **given)

    monkeypatch.setattr(handlers, "run", run)
    monkeypatch.setattr("a2lib.lab.memory.total_bytes", lambda device: 10**12)
    return calls


def test_a_summary_by_value(stored, monkeypatch):
    steps = [step(4.0), step(1.0), step(2.0), step(3.0)]
    memory = {"peak_allocated_bytes": 77}
    calls = played(monkeypatch, device="cuda", steps=steps, memory=memory)
    made = stored(handlers.summary, BENCHMARK, task_of(TINY, steps=4), "cuda")
    assert calls[0].warmup == 1 and calls[0].steps == 4 and calls[0].device == "cuda"
    rows = {row["phase"]: row for row in made}
    assert set(rows) == {"forward", "loss", "backward", "optimizer", "step", "wall"}
    forward = rows["forward"]
    assert [forward[c] for c in ("ms", "ms_mean", "ms_min", "n")] == ["2.5", "2.5", "1.0", "4"]
    assert float(forward["ms_std"]) == pytest.approx(statistics.stdev([1, 2, 3, 4]), rel=1e-5)
    assert 1 < float(forward["ms_p20"]) < 2.5 < float(forward["ms_p80"]) < 4
    assert forward["ms_host"] == "0.5" and rows["step"]["ms_host"] == "2.0"
    assert rows["wall"]["ms_host"] == "" and rows["step"]["peak_bytes"] == "77"
    assert float(rows["step"]["ms"]) == 3 * 2.5 + 3 and float(rows["wall"]["ms"]) == 3 * 2.5 + 4
    assert rows["optimizer"]["ms_std"] == ""  # no spread at all


def test_what_certainly_does_not_fit_is_not_tried(job, monkeypatch):
    calls = played(monkeypatch, steps=[step(1.0)])
    least = least_bytes(TINY.config("cpu"), "cpu")
    monkeypatch.setattr("a2lib.lab.memory.total_bytes", lambda device: least - 1)
    given = job(BENCHMARK, task_of(TINY))
    handlers.summary(given)
    assert calls == []
    assert {row["status"] for row in given.store.rows()} == {"oom"}
    assert given.store.rows()[0]["note"].startswith("not tried: needs at least ")
    monkeypatch.setattr("a2lib.lab.memory.total_bytes", lambda device: least)
    handlers.summary(given)
    assert len(calls) == 1


def test_each_step_is_a_row_and_the_process_ends(job, monkeypatch):
    warm = [step(9.0, reserved_bytes=5), step(8.0, reserved_bytes=6)]
    played(monkeypatch, device="cuda", warmup=warm, steps=[step(1.0, reserved_bytes=6)])
    monkeypatch.setattr(configurations, "WARMUPS", {"cpu": (2,)})
    monkeypatch.setattr(benchmark, "STEPS", 1)
    task, _ = benchmark.warmup_tasks(EVERYTHING, "cpu")
    given = job(BENCHMARK_STEPS, task, "cuda")
    with pytest.raises(LostContext):
        handlers.steps(given)
    rows = [row for row in given.store.rows() if row["phase"] == "forward"]
    found = [(row["step_number"], row["ms"], row["reserved_bytes"]) for row in rows]
    assert found == [("0", "9.0", "5"), ("1", "8.0", "6"), ("2", "1.0", "6")]
    assert len(given.store.rows()) == 3 * 6
    means = {row["phase"]: (row["ms_mean"], row["ms_std"]) for row in benchmark.means(rows)}
    assert means == {"forward": (1.0, "")}


@pytest.mark.parametrize(
    ("raised", "status"), [(RuntimeError("no such thing"), "error"), (MemoryError(), "oom")]
)
def test_a_failed_process_ends_too_and_all_its_rows_say_why(job, monkeypatch, raised, status):
    def timed_parts(*_, **__):
        yield "import", [5.0]
        raise raised

    monkeypatch.setattr(handlers, "timed_parts", timed_parts)
    task = benchmark.first_tasks(EVERYTHING, "cpu")[0]
    given = job(BENCHMARK_FIRST, task)
    with pytest.raises(LostContext):
        handlers.first(given)
    rows = given.store.rows()
    assert len(rows) == 4 and {row["status"] for row in rows} == {status}
    assert all(row["note"] and not row["ms"] for row in rows)


def test_first_steps_are_each_of_a_process_of_their_own(on_cpu, capsys):
    """A process that had imported torch before would refuse and give an error row."""
    run = benchmark.start(Parameters(sweep="first"))
    benchmark.measure_first(run)
    rows = run.store(BENCHMARK_FIRST).rows()
    assert {(row["prepared"], row["part"]) for row in rows} == {
        (prepared, part)
        for prepared in ("nothing", "block")
        for part in ("import", "first", "second", "steady")
    } | {("block", part) for part in ("block_first", "block_second")}
    assert {(row["status"], row["note"]) for row in rows} == {("ok", "")}
    assert {row["n"] for row in rows if row["part"] == "steady"} == {"5"}
    capsys.readouterr()
    benchmark.measure_first(benchmark.start(Parameters(sweep="first")))
    printed = capsys.readouterr().out
    assert "10 rows are stored already" in printed and "block first" in printed


def powered(monkeypatch, *joules):
    """The task, with sensors that tell these energies one after another."""
    told = {name: lambda: 1500 for name in ("sm_mhz", "power_w", "capped")}
    told |= {"energy_j": iter(joules).__next__, "power_limit_w": lambda: 700.0}
    for module in (handlers, device):
        monkeypatch.setattr(module, "Sensors", lambda: SimpleNamespace(**told))
    monkeypatch.setattr(configurations, "SETTLED", {"cpu": (2, 3)})
    (task,) = benchmark.power_tasks(EVERYTHING, "cpu")
    return task


def test_energy_is_of_the_settled_steps(stored, monkeypatch):
    task = powered(monkeypatch, 1000.0, 1150.0)
    calls = played(monkeypatch, device="cuda", steps=[step(x) for x in (9.0, 8.0, 1.0, 2.0, 4.0)])
    (row,) = stored(handlers.power, BENCHMARK_POWER, task)
    assert calls[0].steps == 5 and calls[0].warmup == configurations.WARMUP
    # Three steps of 3 x 1, 2, 4 and 4 ms more, and 150 joules.
    assert (row["joules"], row["n"], row["ms"]) == ("50.0", "3", "10.0")
    assert float(row["ms_mean"]) == pytest.approx((7 + 10 + 16) / 3, rel=1e-5)
    assert row["power_limit_w"] == "700.0" and row["status"] == "ok"


def test_a_step_that_fails_leaves_no_thread(job, monkeypatch):
    task = powered(monkeypatch, 1000.0)
    played(monkeypatch, device="cuda", steps=[step(1.0)] * 3, status="oom", note="in step 3")
    given = job(BENCHMARK_POWER, task)
    before = threading.active_count()
    handlers.power(given)
    (row,) = given.store.rows()
    assert (row["status"], row["note"], row["joules"]) == ("oom", "in step 3", "")
    assert threading.active_count() == before


def test_a_row_is_of_the_configuration_that_its_worker_is_told():
    for kind in ("cuda", "cpu"):
        for table in benchmark.EXPERIMENT.tables:
            for task in table.tasks(EVERYTHING, kind):
                configuration = Configuration(**task.spec["configuration"])
                own = configuration.key(table.section)
                assert all(own.items() <= key.items() for key in task.keys)
                configuration.config(kind)  # is not refused


def test_a_configuration_becomes_the_command_s():
    plain = Configuration("2.7B", 256).config("cpu", warmup=1, steps=2)
    assert plain.resolved()["size"] == "2.7B" and plain.batch == 4 and plain.context == 256
    assert not plain.compile and not plain.compile_blocks
    tiny = Configuration("tiny", 16, compile="model").config("cpu")
    assert tiny.shape == transformer.TINY and tiny.compile
    ours = Configuration("small", 128, attention="flash", compile="blocks", capture=True)
    made = ours.config("cuda")
    assert made.compile_blocks and not made.compile and made.capture


def test_a_cache_that_another_machine_has_is_filled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "cache", lambda repeat: tmp_path / str(repeat))
    (tmp_path / "0").mkdir()
    tasks = benchmark.first_tasks(Parameters(sweep="first"), "cuda")
    made = [task for task in tasks if task.spec["configuration"]["compile"] != "none"]
    compiled = {(task.spec["prepared"], task.spec["repeat"]): task for task in made}
    pending = [*(compiled["cached", repeat] for repeat in range(3)), compiled["nothing", 2]]
    assert benchmark.refilling(tasks, pending) == [compiled["nothing", 1]]
    assert benchmark.refilling(tasks, [t for t in tasks if t not in made]) == []
