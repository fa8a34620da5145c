"""notebooks/memory.ipynb: what it asks for, counts and stores."""

import pytest
import torch
from notebook_cells import committed_keys, load_cells, run_cells, stored_keys

from a2lib.lab import bulk, start, sweep
from a2lib.shapes import MODELS, Shape
from a2lib.theory.memory.step import StepMemory, peak

SMALL = {"context": 16, "batch": 2}


pytestmark = pytest.mark.usefixtures("forked_workers")


def asked_by(**parameters):
    """Return the keys that a run asks for, by table."""
    cells = load_cells("memory", **parameters)
    tasks = {
        "memory": cells.tasks,
        "memory_recording": cells.recording_tasks,
        "memory_block": cells.block_tasks,
    }
    return {table: [key for task in each for key in task] for table, each in tasks.items()}


def test_the_sweeps_and_the_default_ask_for_every_committed_row(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    default = asked_by()
    for table, keys in asked_by(sweep="all").items():
        assert len(stored_keys(table, keys)) == len(keys)
        assert stored_keys(table, [*keys, *default[table]]) == committed_keys(table)


def test_the_pictures_are_named_as_the_committed_ones(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    steps, blocks = set(), set()
    for cells in (load_cells("memory"), load_cells("memory", sweep="all")):
        for case in cells.recorded:
            steps |= {f"{cells.picture(case)}-{n}" for n in cells.STEPS}
        blocks |= {cells.picture({**case, "mode": "forward-backward"}) for case in cells.kept}
    monkeypatch.delenv("A2LIB_DATA")
    for table, names in {
        "memory": steps,
        "largest": steps,
        "lines": steps,
        "saved": blocks,
    }.items():
        assert {name for _, name in bulk.pictures(table)} == names


@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_peaks_are_those_of_the_count(plain_frames, mode):
    cells = load_cells("memory", **SMALL, mode=mode)
    (keys,) = cells.tasks
    rows = list(cells.measure(keys))
    assert all(set(row) == {*cells.peaks.key, "tensor_bytes"} for row in rows)
    most = {(row["step_number"], row["phase"]): row["tensor_bytes"] for row in rows}
    names = cells.phases(cells.asked[0])
    assert set(most) == {(step, phase) for step in (0, 1) for phase in names}
    for step in (0, 1):
        assert most[step, "step"] == max(most[step, name] for name in names[:-1])
    if mode == "train-step":
        # A CPU makes a tensor of the scores less.
        counted = peak(StepMemory(MODELS["tiny"], **SMALL)).total
        assert most[1, "step"] == pytest.approx(counted, rel=0.05)


def test_out_of_memory_names_the_phase_and_keeps_what_was_before():
    cells = load_cells("memory", **SMALL)
    names = cells.namespace

    def run_steps(step, counter, most):
        cells.run_steps(step, counter, most)
        for phase in ("backward", "optimizer", "step"):
            del most[1, phase]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. If you are")

    names["run_steps"] = run_steps
    rows = {(row["step_number"], row["phase"]): row for row in cells.measure(cells.tasks[0])}
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
    tasks = [[{**key, "attention": "mine", "model": "wide"} for key in cells.tasks[0]]]
    assert sweep(cells.peaks, tasks, cells.measure, start("memory", vars(cells)), whole=True) == 0
    rows = cells.peaks.rows()
    assert {(row["attention"], row["status"]) for row in rows} == {("mine", "ok")}, rows


@pytest.mark.slow
def test_all_cells_store_rows_and_pictures_and_recordings_are_of_a_gpu_alone(tmp_path):
    cells = run_cells("memory", **SMALL)
    for table, n in ((cells.peaks, 2 * 5), (cells.blocks, 1)):
        assert [row["status"] for row in table.rows()] == ["ok"] * n
    rows = cells.recordings.rows()
    assert [row["status"] for row in rows] == ["unsupported"] * 2
    assert {row["note"] for row in rows} == {"the history of allocations is a GPU's"}
    pictures = [path.parent.parent.name for path in tmp_path.glob("data/measured/bulk/*/cpu/*.csv")]
    assert pictures == ["saved"]
    (block,) = cells.blocks.frame().to_dict("records")
    assert block["saved_bytes"] == cells.formula(block)
