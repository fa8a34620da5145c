"""What a worker stores of memory, at the smallest sizes; and what is asked of it."""

import contextlib
import dataclasses

import pytest
import torch

from a2lib.experiments import memory
from a2lib.experiments.memory import (
    BLOCK,
    CONTEXTS,
    Parameters,
    handlers,
    phases,
    picture,
)
from a2lib.experiments.steps import Configuration
from a2lib.measure import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING, bulk
from a2lib.measure.snapshot import CATEGORIES
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import peak

TINY = Parameters(context=16, batch=2)


def counted(case, step):
    """What the theory has for a CPU."""
    return peak(dataclasses.replace(memory.counted(case, step), cuda=False)).total


@pytest.fixture
def here(monkeypatch, tmp_path, plain_frames):
    monkeypatch.setattr(handlers, "build_dir", lambda: tmp_path / "build")


@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_peaks_are_those_of_the_count(stored, here, mode):
    asked = dataclasses.replace(TINY, mode=mode)
    (task,) = memory.peak_tasks(asked, "cpu")
    rows = {(int(r["step_number"]), r["phase"]): r for r in stored(handlers.peaks, MEMORY, task)}
    (case,) = asked.configurations("table", "cpu")
    assert set(rows) == {(step, phase) for step in (0, 1) for phase in phases(case)}
    for step in (0, 1):
        assert int(rows[step, "step"]["tensor_bytes"]) == counted(case, step)
        *parts, whole = (int(rows[step, p]["tensor_bytes"]) for p in phases(case))
        assert max(parts) == whole
    assert not any(r["allocated_bytes"] or r["driver_bytes"] for r in rows.values())


def test_a_recording_is_rows_and_pictures(job, here):
    (task,) = memory.recording_tasks(TINY, "cpu")
    given = job(MEMORY_RECORDING, task)
    handlers.recording(given)
    first, second = given.store.rows()
    (case,) = TINY.configurations("recordings", "cpu")
    assert int(first["tensor_bytes"]) == counted(case, 0)
    assert int(second["tensor_bytes"]) == counted(case, 1)
    assert {first["unexplained_bytes"], second["unexplained_bytes"]} == {"0"}
    data = given.store.data
    for table in ("memory", "lines", "largest"):
        assert bulk.pictures(table, data) == [("cpu", f"{picture(case)}-{n}") for n in (0, 1)]
    drawn = bulk.read("memory", "cpu", f"{picture(case)}-1", data)
    totals = [sum(row[c] for c in CATEGORIES) for row in drawn.rows]
    assert max(totals) == counted(case, 1) and drawn.about["peak phase"] == "step 1/backward"
    lines = bulk.read("lines", "cpu", f"{picture(case)}-1", data).rows
    assert any(row["line"].startswith("attention/reference.py:") for row in lines)
    assert memory._counted(second) == counted(case, 1)


def test_a_blocks_recording_climbs_to_what_the_formula_says_and_ends_with_its_gradients(job, here):
    *_, task = memory.recording_tasks(Parameters(sweep="recordings"), "cpu")
    given = job(MEMORY_RECORDING, task)
    handlers.recording(given)
    case = Configuration(**task.spec)
    _, row = given.store.rows()
    drawn = bulk.read("memory", "cpu", f"{picture(case)}-1", given.store.data).rows
    assert case.mode == BLOCK and [dict(r)["status"] for r in given.store.rows()] == ["ok", "ok"]
    assert row["unexplained_bytes"] == "0"
    assert max(sum(r[c] for c in CATEGORIES) for r in drawn) == int(row["tensor_bytes"])
    last = {r["phase"]: r for r in drawn}
    forward, backward = last["step 1/forward"], last["step 1/backward"]
    formula = block_saved_bytes(case.shape, case.batch, case.context)
    assert forward["saved for backward"] == formula and forward["gradients"] == 0
    assert backward["gradients"] == backward["parameters"] - rope_bytes(case)
    assert memory._counted(row) is None


def rope_bytes(case):
    """The table of a block's rotations, which has no gradient."""
    return 4 * case.context * case.shape.head_dim


def test_a_block_keeps_what_the_formula_says(job, here):
    (task,) = memory.block_tasks(TINY, "cpu")
    given = job(MEMORY_BLOCK, task)
    handlers.block(given)
    (row,) = given.store.rows()
    (case,) = TINY.configurations("blocks", "cpu")
    formula = block_saved_bytes(case.shape, 2, 16)
    parameters = 4 * 32**2 + 3 * 32 * 64 + 2 * 32
    assert (row["saved_bytes"], row["gradient_bytes"]) == (str(formula), str(4 * parameters))
    assert row["grown_bytes"] == ""
    seen = bulk.read("saved", "cpu", picture(case), given.store.data).rows
    assert sum(r["bytes"] for r in seen) == formula
    assert any("SoftmaxBackward0.result" in r["operations"] for r in seen)
    assert memory._formula(row) == formula


class Allocator:
    """The statistics of an allocator whose phases peak at 100, 200, ... bytes."""

    def __init__(self):
        self.peaks = iter(range(100, 9900, 100))

    def memory_stats(self):
        most = next(self.peaks)
        names = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        return {f"{name}.all.peak": most + i for i, name in enumerate(names)}

    def reset_peak_memory_stats(self):
        pass

    def mem_get_info(self):
        return 40, 1000


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU of made-up numbers: its tensors are on the CPU."""
    for name in ("memory_stats", "reset_peak_memory_stats", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(Allocator(), name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    made = handlers.Workload

    def workload(config, device):
        return made(dataclasses.replace(config, device="cpu"), "cpu")

    monkeypatch.setattr(handlers, "Workload", workload)


def test_a_gpus_peaks_by_phase(stored, monkeypatch, stand_in):
    (task,) = memory.peak_tasks(dataclasses.replace(TINY, model="tiny"), "cuda")
    made = stored(handlers.peaks, MEMORY, task, "cuda")
    rows = {(int(r["step_number"]), r["phase"]): r for r in made}
    levels = ("tensor_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes")
    found = {key: [row[c] for c in levels] for key, row in rows.items()}
    assert found[0, "forward"] == ["100", "101", "102", ""]
    assert found[0, "step"] == ["400", "401", "402", "960"]
    assert found[1, "step"] == ["800", "801", "802", "960"]


def test_out_of_memory_names_the_phase_and_keeps_what_was_before(stored, monkeypatch, stand_in):
    @contextlib.contextmanager
    def phase(self, name):
        yield from real(self, name)
        if (self._number, name) == (1, "backward"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. If you are")

    real = handlers.Peaks.phase.__wrapped__
    monkeypatch.setattr(handlers.Peaks, "phase", phase)
    (task,) = memory.peak_tasks(dataclasses.replace(TINY, model="tiny"), "cuda")
    made = stored(handlers.peaks, MEMORY, task, "cuda")
    rows = {(int(r["step_number"]), r["phase"]): r for r in made}
    assert rows[0, "step"]["status"] == rows[1, "loss"]["status"] == "ok"
    for name in ("optimizer", "step"):
        assert rows[1, name]["status"] == "oom"
        assert rows[1, name]["note"] == (
            "in step 1, backward: CUDA out of memory. Tried to allocate 2 GiB."
        )


def test_what_a_cpu_would_have_to_swap_is_not_tried(stored, monkeypatch):
    monkeypatch.setattr("a2lib.measure.memory.available_bytes", lambda: 1000)
    for section, tasks, handler in (
        (MEMORY, memory.peak_tasks(TINY, "cpu"), handlers.peaks),
        (MEMORY_RECORDING, memory.recording_tasks(TINY, "cpu"), handlers.recording),
        (MEMORY_BLOCK, memory.block_tasks(TINY, "cpu"), handlers.block),
    ):
        made = stored(handler, section, tasks[0])
        assert {r["status"] for r in made} == {"oom"}
        assert all(r["note"].startswith("not tried: needs") for r in made)


def test_the_sweeps_have_what_the_questions_ask():
    everything = Parameters(sweep="all")
    table = everything.configurations("table", "cuda")
    for context in (128, 256, 512, 2048):  # of both editions
        for mode in ("inference", "train-step"):
            for precision in ("fp32", "bf16"):
                assert Configuration("2.7B", context, mode=mode, precision=precision) in table
    models = {case.model for case in everything.configurations("sizes", "cuda")}
    assert models == {"small", "medium", "large", "xl25", "10B"}
    blocks = {(c.precision, c.attention) for c in everything.configurations("blocks", "cuda")}
    assert len(blocks) == 4
    assert Configuration("2.7B", 512) in everything.configurations("recordings", "cuda")
    for sweep in ("table", "sizes", "recordings", "blocks"):
        found = everything.configurations(sweep, "cuda")
        assert len({picture(case) for case in found}) == len(set(found)) == len(found)
        assert Parameters(sweep="table").has(sweep) == (sweep == "table")
    assert Parameters(sweep="table").configurations("table", "cpu")[0].context in CONTEXTS["cpu"]
