"""The count of a step's tensors against a GPU's own statistics, and what a block keeps."""

import pytest

from a2lib.experiments import memory
from a2lib.experiments.harness.worker import Job
from a2lib.experiments.memory import counted, handlers
from a2lib.experiments.steps import MODELS, Configuration
from a2lib.lab import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING, Table, start_run
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import asked
from a2lib.theory.transformer import Shape

pytestmark = pytest.mark.gpu
# Each matrix is larger than the small blocks of the allocator, and head_dim is one of flash's.
SHAPE = Shape(d_model=1024, d_ff=2048, num_layers=2, num_heads=16, vocab_size=2048)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """``measured(section, handler, task)``: the rows that a worker would store."""
    monkeypatch.setitem(MODELS, "tiny", SHAPE)
    run = start_run(command="test", parameters={}, device="gpu", data=tmp_path)

    def measure(section, handler, task):
        handlers.prepare()
        store = Table(section, "gpu", tmp_path)
        handler(Job(task.spec, "cuda", wanted=task.rows, run=run, store=store))
        return store.rows()

    return measure


def parameters(case):
    given = {"context": case.context, "mode": case.mode, "precision": case.precision}
    return memory.Parameters(model="tiny", attention=case.attention, **given)


CASES = [
    Configuration("tiny", 256, 4, mode, precision, attention)
    for mode in ("inference", "forward", "train-step")
    for precision in ("fp32", "bf16")
    for attention in ("eager", "flash")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_the_counted_one(measured, no_garbage, case):
    (task,) = memory.peak_tasks(parameters(case), "cuda")
    rows = measured(MEMORY, handlers.peaks, task)
    for row in rows:
        if row["phase"] == "step":
            step = int(row["step_number"])
            more = int(row["tensor_bytes"]) - asked(counted(case, step))
            assert abs(more) <= 2**20, (step, more)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_recording_has_the_same_peak(measured, no_garbage, precision):
    case = Configuration("tiny", 256, precision=precision)
    (task,) = memory.recording_tasks(parameters(case), "cuda")
    for row in measured(MEMORY_RECORDING, handlers.recording, task):
        more = int(row["tensor_bytes"]) - asked(counted(case, int(row["step_number"])))
        assert abs(more) <= 2**20, more
        assert row["unexplained_bytes"] == "0"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_the_allocator_gives_what_a_block_keeps(measured, no_garbage, attention, precision):
    case = Configuration("tiny", 256, 4, "forward-backward", precision, attention)
    (task,) = memory.block_tasks(parameters(case), "cuda")
    (row,) = measured(MEMORY_BLOCK, handlers.block, task)
    formula = block_saved_bytes(SHAPE, case.batch, case.context, attention, precision)
    assert int(row["saved_bytes"]) == int(row["grown_bytes"]) == formula
