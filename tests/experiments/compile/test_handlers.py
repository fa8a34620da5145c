"""What a worker stores: at the smallest size with Inductor's plan alone, and of results by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from inductor_plans import planned

from a2lib.experiments import compile as compiling
from a2lib.experiments.compile import Shape, Steps, attention, model, turns
from a2lib.experiments.steps import Configuration
from a2lib.experiments.workload import Result, StepTimes
from a2lib.lab import COMPILE_ATTENTION, COMPILE_MODEL, inductor

SHAPE = Shape("plain", "fp32", 16, 8, batch=2)
TIMING = {"cpu": {"warmup_ms": 0, "rep_ms": 0.01, "min_n": 2, "max_n": 2}}


def step(forward):
    """A step whose forward takes so long."""
    ms = {"forward": forward, "loss": 1.0, "backward": 2 * forward, "optimizer": 2.0}
    return StepTimes(ms, dict.fromkeys(ms, 0.5), sum(ms.values()), 1 + sum(ms.values()))


@pytest.fixture(autouse=True)
def worker(tmp_path, monkeypatch, configured):
    """A worker with compiled code of its own, which it times quickly."""
    monkeypatch.setattr(inductor, "prime", lambda device: None)
    monkeypatch.setattr(turns, "TIMING", TIMING)
    monkeypatch.setattr(inductor, "cache_dir", lambda: tmp_path)


def of_attention(job, in_turns=True):
    (task,) = compiling.attention_tasks(SimpleNamespace(shapes=lambda device: [SHAPE]), "cpu")
    said = []
    given = replace(job(COMPILE_ATTENTION, task), emit=said.append, in_turns=in_turns)
    with planned():
        attention.measure(given)
    rows = {(r["implementation"], r["pass"]): r for r in given.store.rows()}
    return rows, [event["begin"] for event in said if "begin" in event]


def test_alone_each_is_to_blame_for_itself(job, monkeypatch):
    right = attention.reference
    monkeypatch.setattr(
        attention, "reference", lambda causal, compiled: right(causal, compiled=False)
    )
    rows, begun = of_attention(job, in_turns=False)
    assert begun == ["eager"] * 3 + ["compile"] * 3
    assert {(r["status"], r["kernels_called"]) for r in rows.values()} == {("ok", "")}


def test_a_wrong_result_is_an_error_and_eager_is_still_timed(job, monkeypatch):
    right = attention.reference

    def reference(causal, *, compiled):
        forward = right(causal, compiled=False)
        return (lambda q, k, v: 1.1 * forward(q, k, v)) if compiled else forward

    monkeypatch.setattr(attention, "reference", reference)
    rows, _ = of_attention(job)
    assert {rows["compile", p]["status"] for p in ("forward", "backward")} == {"error"}
    assert "wrong o" in rows["compile", "forward"]["note"]
    assert {rows["eager", p]["status"] for p in ("forward", "backward")} == {"ok"}


GRAPHS = [
    inductor.Graph(False, 2, 3, 4, 0, 100),
    inductor.Graph(False, 1, 1, 0, 0, 10),
    inductor.Graph(True, 1, 1, 0, 0, 20),
    inductor.Graph(True, 5, 6, 7, 0, 200),
]


def played(monkeypatch, refuse=()):
    """The benchmark ends with steps of 10, 20, ... ms, its first step of 1000 more; the calls, each
    by what it compiles and how many steps it takes."""
    calls = []

    def run(config):
        way = "model" if config.compile else "blocks" if config.compile_blocks else "none"
        calls.append((way, config.steps))
        if way in refuse:
            return Result(config, device="cpu", status="oom", note="in step 0: much")
        ms = 10.0 * len(calls)
        return Result(config, device="cpu", warmup=[step(ms + 1000)], steps=[step(ms)] * 5)

    monkeypatch.setattr(model, "run", run)
    monkeypatch.setattr("a2lib.lab.memory.total_bytes", lambda device: 10**12)
    return calls


def of_model(stored, ways=("none", "blocks", "model"), cached=True):
    steps = Steps(Configuration("tiny", 16), ways, cached)
    (task,) = compiling.model_tasks(SimpleNamespace(steps=lambda device: [steps]), "cpu")
    made = stored(model.measure, COMPILE_MODEL, task)
    return {(r["compile"], r["phase"]): r for r in made}


def test_a_model_takes_turns_and_both_runs_count(stored, monkeypatch):
    calls = played(monkeypatch)
    rows = of_model(stored)
    assert [way for way, _ in calls] == ["none", "blocks", "model"] * 2
    assert len(rows) == 18 and {r["status"] for r in rows.values()} == {"ok"}
    forward = rows["blocks", "forward"]
    assert (forward["n"], forward["ms_mean"], forward["ms_min"]) == ("10", "35.0", "20.0")
    assert (forward["ms_cold"], forward["ms_warm"]) == ("1020.0", "1050.0")
    assert float(rows["model", "wall"]["ms_cold"]) == 1030 + 1 + 2060 + 2 + 1


def test_what_is_compiled_once_has_as_many_steps_and_no_time_from_the_cache(stored, monkeypatch):
    calls = played(monkeypatch)
    rows = of_model(stored, ways=("model",), cached=False)
    assert calls == [("model", 2 * model.STEPS)]
    whole = rows["model", "wall"]
    assert float(whole["ms_cold"]) > 1000 and whole["ms_warm"] == "" and whole["status"] == "ok"


def test_a_way_that_does_not_fit_leaves_the_others(stored, monkeypatch):
    calls = played(monkeypatch, refuse=["model"])
    rows = of_model(stored)
    assert [way for way, _ in calls] == ["none", "blocks", "model", "none", "blocks"]
    statuses = {way: rows[way, "wall"]["status"] for way in ("none", "blocks", "model")}
    assert statuses == {"none": "ok", "blocks": "ok", "model": "oom"}
    assert rows["model", "forward"]["note"] == "in step 0: much"


def test_graphs_go_to_the_phases_that_run_them():
    made = model.by_phase(GRAPHS, 1)
    calls = {phase: (row["kernels_called"], row["library_calls"]) for phase, row in made.items()}
    parts = {"forward": (3, 4), "loss": (1, 0), "backward": (7, 7)}
    assert calls == parts | dict.fromkeys(("step", "wall"), (11, 11))
    assert made["wall"]["moved_bytes"] == 330 and made["wall"]["kernels_written"] == 9


def test_a_block_stands_for_all_of_them():
    made = model.by_phase(GRAPHS, 12)
    assert made["forward"]["kernels_called"] == 36 and made["forward"]["kernels_written"] == 2
    assert made["backward"]["kernels_called"] == 1 + 72
    assert made["backward"]["moved_bytes"] == 20 + 12 * 200
    # Compiled once for each of two blocks, each is called once.
    twice = [GRAPHS[0], *GRAPHS[:2], GRAPHS[2], GRAPHS[3], GRAPHS[3]]
    assert model.by_phase(twice, 2)["forward"]["kernels_called"] == 6
    assert model.by_phase(twice, 2)["backward"]["kernels_called"] == 13


def test_a_forward_has_no_loss_among_its_graphs():
    graphs = [GRAPHS[0], GRAPHS[0], *GRAPHS[-1:]]  # and a backward that is compiled with them
    made = model.by_phase(graphs, 10, "forward")
    assert set(made) == {"forward", "step", "wall"}
    assert made["step"]["kernels_called"] == 5 * 2 * GRAPHS[0].called
    assert model.by_phase([], 10, "forward")["step"] == {}
