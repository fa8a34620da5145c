"""Compiling ahead: parallel, within its memory and time, and never the end of a sweep."""

import json
import sys
import time

import pytest

from a2lib.experiments.precompile import (
    CONTEXT_BYTES,
    Compilation,
    compilations,
    compile_ahead,
    worker_count,
)
from a2lib.experiments.process import Worker
from a2lib.experiments.shapes import Shape, sweep_shapes

SHAPES = [Shape("bf16", 1, 1, 2**n, 64, True) for n in range(7, 15)]


@pytest.fixture
def ahead(play, tmp_path):
    log = tmp_path / "log"

    def run(names=("compile",), workers=2, memory_bytes=10**12, timeout_s=2, until=None, **parts):
        pending = [Compilation(shape, name) for shape in SHAPES for name in names]
        seen = []
        outcome = compile_ahead(
            pending,
            device="cuda",
            workers=workers,
            memory_bytes=memory_bytes,
            timeout_s=timeout_s,
            until=until,
            progress=seen.append,
            command=play(log=str(log), **parts),
        )
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert len(seen) == outcome.done + len(outcome.failed) or until is not None
        return outcome, lines

    return run


def test_work_is_shared(ahead):
    outcome, lines = ahead(names=("compile", "flex"), seconds=0.05)
    assert outcome.done == len(lines) == 16 and not outcome.failed and outcome.left == 0
    assert len({pid for *_, pid in lines}) == 2
    assert lines[0][1] == max(shape.seq_len for shape in SHAPES)


@pytest.mark.parametrize("part, reason", [("die", "SIGABRT"), ("fail", "no")])
def test_a_worker_that_fails_loses_its_task_alone(ahead, part, reason):
    outcome, lines = ahead(names=("compile", "flex"), flex=part)
    assert outcome.done == 8 and len(outcome.failed) == 8 and outcome.left == 0
    assert all(task.implementation == "flex" and reason in why for task, why in outcome.failed)
    assert {name for name, *_ in lines} >= {"compile"}


def test_a_worker_that_hangs_is_replaced(ahead, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", SHAPES[:2])
    outcome, _ = ahead(names=("compile", "flex"), flex="hang", timeout_s=1)
    assert outcome.done == 2 and len(outcome.failed) == 2
    assert all("no answer within" in why for _, why in outcome.failed)


def test_the_largest_wait_for_memory_or_are_left(ahead):
    needed = sorted(Compilation(shape, "compile").bytes for shape in SHAPES)
    outcome, lines = ahead(memory_bytes=needed[-2] + 2 * CONTEXT_BYTES)
    assert outcome.done == 7 and outcome.left == 1
    assert max(length for _, length, _ in lines) == SHAPES[-2].seq_len


def test_the_time_limit_gives_up_what_runs(ahead):
    started = time.monotonic()
    outcome, _ = ahead(until=time.time() + 1.5, seconds=0.6, timeout_s=60)
    assert outcome.left > 0 and outcome.left + outcome.done == 8 and not outcome.failed
    assert time.monotonic() - started < 20


def test_our_kernels_compile_once_for_all_lengths():
    tasks = compilations({shape: ("a2lib", "eager", "flex", "compile") for shape in SHAPES})
    names = [task.implementation for task in tasks]
    assert {name: names.count(name) for name in names} == {"a2lib": 1, "flex": 8, "compile": 8}


def test_worker_count():
    assert worker_count(0) == worker_count(1, 8) == worker_count(100, 1) == worker_count(3) == 0
    assert worker_count(100, 8) == 8 and worker_count(3, 8) == 3


def test_every_shape_of_the_sweep_has_an_estimate():
    for shape in sweep_shapes("all"):
        eager, flex = (Compilation(shape, name).bytes for name in ("compile", "flex"))
        assert eager >= 6 * shape.matrix_bytes and flex > 0


COUNTING = """
from a2lib.experiments import worker
def counters(task, emit):
    from torch._dynamo.utils import counters as counted
    emit({**counted["inductor"], **counted["aot_autograd"]})
worker.HANDLERS["counters"] = counters
worker.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.prefix, reason="Inductor's call of g++ breaks at a space in a path")
def test_the_next_process_finds_the_code_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    shape = {"dtype": "fp32", "batch": 1, "heads": 1, "seq_len": 16, "head_dim": 8, "causal": True}
    task = {
        "do": "compile",
        "shape": shape,
        "implementation": "compile",
        "device": "cpu",
        "seed": 0,
    }
    counted = []
    for _ in range(2):
        with Worker([sys.executable, "-c", COUNTING]) as worker:
            assert list(worker.ask(task, 300)) == []
            counted += worker.ask({"do": "counters"}, 60)
    first, second = counted
    assert first["autograd_cache_miss"] == 1 and first["fxgraph_cache_miss"] == 2
    assert second["autograd_cache_hit"] == 1 and second["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in second
