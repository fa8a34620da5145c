"""What a worker stores of memory, at the smallest sizes; and what is asked of it."""

import contextlib
import dataclasses

import pytest
import torch

from a2lib.experiments import memory
from a2lib.experiments.memory import Parameters, handlers, phases
from a2lib.lab import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING
from a2lib.theory.memory.step import peak

TINY = Parameters(context=16, batch=2)


def counted(case, step):
    """About what the theory has: a CPU makes a tensor of the scores less."""
    return pytest.approx(peak(memory.counted(case, step)).total, rel=0.05)


@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_peaks_are_those_of_the_count(stored, mode):
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


def test_a_recording_is_of_a_gpu(stored):
    (task,) = memory.recording_tasks(TINY, "cpu")
    rows = stored(handlers.recording, MEMORY_RECORDING, task)
    assert [row["status"] for row in rows] == ["unsupported"] * 2
    assert {row["note"] for row in rows} == {"the history of allocations is a GPU's"}


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU of made-up numbers: its tensors are on the CPU, its phases peak at 100 bytes."""
    names = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    peaks = {f"{name}.all.peak": 100 for name in names}
    given = {"memory_stats": peaks, "mem_get_info": (40, 1000)}
    for name in (*given, "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: given.get(name))
    made, config_of = handlers.Workload, dataclasses.replace
    monkeypatch.setattr(
        handlers, "Workload", lambda config, _: made(config_of(config, device="cpu"), "cpu")
    )


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
    note = "in step 1, backward: CUDA out of memory. Tried to allocate 2 GiB."
    for name in ("optimizer", "step"):
        assert (rows[1, name]["status"], rows[1, name]["note"]) == ("oom", note)


def test_what_a_cpu_would_have_to_swap_is_not_tried(stored, monkeypatch):
    monkeypatch.setattr("a2lib.lab.memory.available_bytes", lambda: 1000)
    for section, tasks, handler in (
        (MEMORY, memory.peak_tasks(TINY, "cpu"), handlers.peaks),
        (MEMORY_RECORDING, memory.recording_tasks(TINY, "cpu"), handlers.recording),
        (MEMORY_BLOCK, memory.block_tasks(TINY, "cpu"), handlers.block),
    ):
        made = stored(handler, section, tasks[0])
        assert {r["status"] for r in made} == {"oom"}
        assert all(r["note"].startswith("not tried: needs") for r in made)
