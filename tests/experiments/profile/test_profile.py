"""What is traced, and what a worker stores of it: by value on the traces made by hand."""

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from experiments.benchmark.test_benchmark import step
from profiles import make
from refusals import refused

from a2lib.benchmark import Result
from a2lib.benchmark.__main__ import parse
from a2lib.experiments import profile
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.profile import Parameters, handlers, sweep_of
from a2lib.lab import PROFILE, bulk, nsight, trace
from a2lib.lab.failures import LostContext
from a2lib.lab.program import ProgramError

HERE = Path(make.__file__).parent
(TASK,) = profile.tasks(Parameters(context=16), "cpu")


SOME = sweep_of("all", "cuda", "nsys")[::7] + sweep_of("all", "cpu", "torch")


@pytest.mark.parametrize("traced", SOME, ids=str)
def test_the_command_is_the_configuration(traced, monkeypatch):
    monkeypatch.setattr("a2lib.benchmark.__main__.check_here", lambda config: "cuda")
    config = traced.config("cpu", steps=2, nvtx=traced.ranges, torch_profile="t.json")
    python, flag, module, *options = handlers.command(config)
    assert (flag, module) == ("-m", "a2lib.benchmark")
    assert parse(options) == (config, True)


@pytest.fixture
def found():
    return trace.read(HERE / "report.sqlite")


def values(phase, found):
    timer = SimpleNamespace(steps=[step(4.0), step(2.0), step(3.0)])
    under = {"steps": [dataclasses.asdict(step(5.0)), dataclasses.asdict(step(7.0))]}
    return handlers.values(phase, found, trace.phase_times(found), timer, under)


def test_the_values_of_a_phase(found):
    row = values("forward", found)
    want = {"ms": 0.18, "ms_timer": 3, "ms_traced": 6, "ms_busy": 0.16, "ms_range": 0.19,
            "ms_host": 0.5, "ms_launching": 0.015, "us_queued": 115, "ms_p20": 0.18,
            "ms_p80": 0.18}  # fmt: skip
    assert {name: row[name] for name in want} == pytest.approx(want)
    assert (row["n"], row["launches"], row["ms_waiting"], row["note"]) == (1, 3, None, "")
    assert row["no_class_percent"] == row["no_launch_percent"] == row["no_range_percent"] == 0


def test_the_values_of_a_step_tell_what_could_not_be_filed(found):
    row = values("step", found)
    assert (row["ms"], row["ms_timer"], row["ms_host"]) == pytest.approx((0.865, 12, 2))
    assert row["ms_waiting"] == pytest.approx(0.025)
    assert row["no_launch_percent"] == pytest.approx(100 * 25 / 400)
    assert row["no_range_percent"] == row["no_class_percent"] == pytest.approx(5)
    assert row["note"] == "CUPTI events were lost; no class: mystery_kernel"
    found.notes[:] = ["Profiling has started."]
    assert values("step", found)["note"] == "no class: mystery_kernel"


def test_a_phase_that_is_not_there_is_an_error(found):
    assert values("loss", found) == {"status": "error", "note": "the trace has no loss"}


def test_a_trace_of_a_cpu_has_no_host_apart():
    row = values("backward", trace.read(HERE / "cpu_trace.json.gz"))
    assert row["status"] == "ok" and row["ms"] > 0
    assert {row[c] for c in ("ms_host", "ms_launching", "us_queued", "launches")} == {None}


def test_the_window_of_a_block_is_its_range_or_as_long(found):
    kernels = found.steps()["step 0"]
    windows = handlers.block_windows(found, kernels, 1)
    # layers.0 itself has no range here: the phases whole, from 100 to 280 and from 500 to 660.
    for phase, length in (("forward", 180), ("backward", 160)):
        rows = windows[phase]
        assert rows[0]["start_us"] == 0
        assert max(row["start_us"] + row["duration_us"] for row in rows) == length
    thirds = handlers.block_windows(found, kernels, 3)["forward"]  # from 160 to 220
    computed = [(r["start_us"], r["duration_us"]) for r in thirds if r["stream"] == "7"]
    assert computed == [(0, 40), (50, 10)]
    cpu = trace.read(HERE / "cpu_trace.json.gz")
    rows = handlers.block_windows(cpu, cpu.steps()["step 0"], 1)
    assert {row["phase"] for row in rows["backward"]} == {"backward"}
    assert "lm_head" not in {row["part"] for row in rows["forward"]}


def played(monkeypatch, status="ok", traced="ok", error=None):
    """The timer ends so, and tracing gives a trace made by hand; its calls."""
    calls = []

    def run(config):
        steps = [step(1.0)] if status == "ok" else []
        return Result(config, status=status, note="in step 0: much", steps=steps)

    def record(asked, config):
        calls.append((asked, config))
        if error:
            raise error
        said = {"status": traced, "note": "why", "steps": [dataclasses.asdict(step(2.0))]}
        return trace.read(HERE / "cpu_trace.json.gz"), said

    monkeypatch.setattr(handlers, "run", run)
    monkeypatch.setattr(handlers, "record", record)
    monkeypatch.setattr("a2lib.lab.memory.total_bytes", lambda device: 10**12)
    return calls


@pytest.mark.parametrize("ends", [{"status": "oom"}, {"traced": "oom"}])
def test_out_of_memory_is_a_row_with_or_without_the_profiler(stored, monkeypatch, tmp_path, ends):
    calls = played(monkeypatch, **ends)
    made = stored(handlers.measure, PROFILE, TASK)
    assert {row["status"] for row in made} == {"oom"} and len(made) == 5
    assert len(calls) == ("traced" in ends)
    assert not bulk.pictures("kernels", tmp_path)


@pytest.mark.parametrize("stuck", [False, True])
def test_no_trace_is_an_error_and_a_stuck_child_ends_the_worker(job, monkeypatch, stuck):
    error = ProgramError("nsys profile left no report: x", stuck=stuck)
    played(monkeypatch, error=error)
    given = job(PROFILE, TASK)
    with pytest.raises(LostContext) if stuck else contextlib.nullcontext():
        handlers.measure(given)
    assert {(row["status"], row["note"]) for row in given.store.rows()} == {("error", str(error))}


def test_the_line_of_the_benchmark_among_those_of_nsys():
    line = json.dumps({"status": "ok", "steps": []})
    assert handlers._said(f"Collecting data...\n{line}\nGenerating 'x'\n")["steps"] == []
    refused("printed no result", handlers._said, "Generating\n", error=ProgramError)


def test_who_traces(monkeypatch):
    def who(device, asked):
        return profile.profiler(Parameters(profiler=asked), device)

    monkeypatch.setattr(nsight, "find", lambda: None)
    assert who("cuda", "auto") == "torch"
    asked = Parameters(profiler="nsys")
    words = "'nsys': not found on the path"
    refused(words, profile.refuse, asked, "cuda", error=ParameterError)
    monkeypatch.setattr(nsight, "find", lambda: "/usr/bin/nsys")
    assert who("cuda", "auto") == "nsys"
    assert who("cpu", "auto") == who("cuda", "torch") == "torch"
    profile.refuse(asked, "cuda")
