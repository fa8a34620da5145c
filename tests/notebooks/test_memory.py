"""notebooks/memory.ipynb: what it asks for, counts and stores."""

import pandas as pd
import pytest
import torch
from notebook_cells import identities, load_cells, published, run_cells
from tables import by, values

from a2lib.lab import bulk, start, sweep
from a2lib.shapes import MODELS, Shape
from a2lib.theory.memory.step import StepMemory, peak

SMALL = {"context": 16, "batch": 2}

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_the_sweeps_and_the_default_ask_for_every_committed_row(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    whole, default = load_cells("memory", sweep="all"), load_cells("memory")
    for table, tasks in (
        (whole.peaks, "tasks"),
        (whole.recordings, "recording_tasks"),
        (whole.blocks, "block_tasks"),
    ):
        asked = identities(table, getattr(whole, tasks))
        assert asked | identities(table, getattr(default, tasks)) == published(table)


def test_the_pictures_are_named_as_the_committed_ones(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    steps, blocks = set(), set()
    for cells in (load_cells("memory"), load_cells("memory", sweep="all")):
        for case in cells.recorded:
            for n in cells.STEPS:
                steps.add(("nvidia-h200", f"{cells.picture(case)}-{n}"))
        for case in cells.kept:
            blocks.add(("nvidia-h200", cells.picture({**case, "mode": "forward-backward"})))
    monkeypatch.delenv("A2LIB_DATA")
    for table in ("memory", "largest", "lines"):
        assert set(bulk.pictures(table)) == steps
    assert set(bulk.pictures("saved")) == blocks


@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_peaks_are_those_of_the_count(plain_frames, mode):
    cells = load_cells("memory", **SMALL, mode=mode)
    (keys,) = cells.tasks
    rows = pd.DataFrame(cells.measure(keys))
    assert set(rows.columns) == {*cells.peaks.key, "tensor_bytes"}
    # A line for each of two steps, a column for each phase.
    most = rows.pivot(index="step_number", columns="phase", values="tensor_bytes")
    assert list(most.index) == [0, 1]
    assert set(most.columns) == set(cells.phases(cells.asked[0]))
    assert most.notna().all(axis=None)
    assert (most.pop("step") == most.max(axis="columns")).all()
    if mode == "train-step":
        # A CPU makes a tensor of the scores less.
        counted = peak(StepMemory(MODELS["tiny"], **SMALL)).total
        assert most.loc[1].max() == pytest.approx(counted, rel=0.05)


def test_out_of_memory_names_the_phase_and_keeps_what_was_before():
    cells = load_cells("memory", **SMALL)
    names = cells.namespace

    def run_steps(step, counter, most):
        cells.run_steps(step, counter, most)
        for phase in ("backward", "optimizer", "step"):
            del most[1, phase]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. If you are")

    names["run_steps"] = run_steps
    rows = by(cells.measure(cells.tasks[0]), "step_number", "phase")
    assert rows[0, "step"]["tensor_bytes"] and rows[1, "loss"]["tensor_bytes"]
    note = "in step 1, backward: CUDA out of memory. Tried to allocate 2 GiB."
    for phase in ("backward", "optimizer", "step"):
        assert (rows[1, phase]["status"], rows[1, phase]["note"]) == ("oom", note)


def test_an_attention_and_a_size_of_the_readers_are_measured_in_a_worker():
    def mine(q, k, v):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    cells = load_cells("memory", **SMALL)
    cells.ATTENTION["mine"], cells.sizes["wide"] = mine, Shape(16, 16, 1, 2, vocab_size=11)
    task = [{**key, "attention": "mine", "model": "wide"} for key in cells.tasks[0]]
    assert sweep(cells.peaks, [task], cells.measure, start("memory", vars(cells)), whole=True) == 0
    rows = cells.peaks.rows()
    assert set(values(rows, "attention", "status")) == {("mine", "ok")}, rows


@pytest.mark.slow
def test_all_cells_store_rows_and_pictures_and_recordings_are_of_a_gpu_alone(tmp_path):
    cells = run_cells("memory", **SMALL)
    assert values(cells.peaks.rows(), "status") == ["ok"] * 2 * 5
    assert values(cells.blocks.rows(), "status") == ["ok"]
    of_a_gpu = ("unsupported", "the history of allocations is a GPU's")
    assert values(cells.recordings.rows(), "status", "note") == [of_a_gpu] * 2
    (picture,) = tmp_path.glob("data/measured/bulk/*/cpu/*.csv")
    assert picture.parent.parent.name == "saved"
    (block,) = cells.blocks.frame().to_dict("records")
    assert block["saved_bytes"] == cells.formula(block)
