"""The notebooks of a training step that ranks take together, on two GPUs at tiny size."""

import pytest
import torch
from notebook_cells import load_cells

from a2lib.lab import bulk, read_section, sweep
from a2lib.lab.notebook import Run

TINY = {"model": "tiny", "batch": 2, "context": 8}
EAGER = {"attention": "eager", "compile": "none"}

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]


@pytest.fixture(autouse=True)
def rows_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))


def with_each(keys, columns):
    """Return the keys with these columns in place of their own."""
    return [{**key, **columns} for key in keys]


def measured(table, tasks, measure, **options):
    """Return the rows that two ranks measure, of an eager model."""
    tasks = [with_each(task, EAGER) for task in tasks]
    run = Run("training", {}, {}, "cuda", table.device)
    assert sweep(table, tasks, measure, run, ranks=2, **options) == 0
    rows = read_section(table.section.name)[table.device]
    for row in rows:
        assert (row["status"], row["note"]) == ("ok", ""), row
    assert len(rows) == sum(map(len, tasks))
    return rows


def keys_of(first, ways):
    """Return the first key with each way's columns in place of its own."""
    return [{**first, **way} for way in ways]


def wrappers_of(rows):
    return {row["wrapper"] for row in rows}


@pytest.mark.parametrize("capture", [False, True])
def test_every_way_to_average_gradients(capture):
    cells = load_cells("ddp", **TINY, capture=capture)
    ways = [cells.way("naive"), cells.way("flat"), cells.way("overlapped")]
    ways += [*cells.DRAWN[2:], *cells.IN_BF16, cells.UPDATING, *cells.MORE_UPDATING]
    if not capture:
        ways += [cells.way("torch_ddp", 25), *cells.OF_TORCH]
    [first, *_] = cells.tasks[0]
    rows = measured(cells.table, [keys_of(first, ways)], cells.measure)
    for row in rows:
        assert float(row["ms_host"]) > 0 and float(row["ms_without"]) > 0
        assert bool(row["ms_without_updating"]) is (capture and row["wrapper"] == "updating")
    pictures = bulk.pictures("strip")
    assert len(pictures) == (2 if capture else 4)
    for device, name in pictures:
        kinds = [row["kind"] for row in bulk.read("strip", device, name).rows]
        assert "communication" in kinds and "matmul" in kinds, name


@pytest.mark.parametrize("capture", [False, True])
def test_every_way_that_asks_nccl(capture):
    cells = load_cells("ddp", **TINY, capture=capture)
    [first, *_] = cells.tasks[0]
    ways = cells.OURS_BY_NCCL if capture else cells.TORCH_BY_NCCL
    rows = measured(cells.table, [keys_of(first, ways)], cells.measure)
    assert wrappers_of(rows) == wrappers_of(ways)


def test_products_leave_multiprocessors_within_a_context():
    library = torch.backends.cuda.preferred_blas_library()
    with pytest.raises(KeyError), load_cells("ddp", **TINY).leaving_sms(16):
        assert torch._C._get_sm_carveout_experimental() == 16
        raise KeyError
    assert torch._C._get_sm_carveout_experimental() is None
    assert torch.backends.cuda.preferred_blas_library() == library


def test_data_parallelism_with_16_bit_weights():
    cells = load_cells("fsdp", **TINY, capture=True)
    [first, *_] = cells.tasks[0]
    task = []
    for name in cells.REPLICATED:
        task.append({**first, "wrapper": name, "precision": "bf16_weights"})
    for row in measured(cells.table, [task], cells.measure):
        assert float(row["ms_without"]) > 0


@pytest.mark.parametrize("capture", [False, True])
def test_every_sharded_model(capture):
    cells = load_cells("fsdp", **TINY, capture=capture)
    memory = measured(cells.memory_table, cells.memory_tasks, cells.measure_memory, whole=True)
    held = {}
    for row in memory:
        held[row["wrapper"], row["step_number"], row["moment"]] = row
    for wrapper in ("fsdp", "fsdp2", "ddp", "zero1"):
        after = held[wrapper, "3", "after"]
        named = int(after["parameter_bytes"]) + int(after["gradient_bytes"])
        named += int(after["optimizer_bytes"])
        peak = int(held[wrapper, "3", "peak"]["tensor_bytes"])
        assert peak >= int(after["present_bytes"]) >= named
    rows = measured(cells.table, cells.tasks, cells.measure)
    assert wrappers_of(rows) == ({"fsdp"} if capture else {"fsdp", "fsdp2"})
    for row in rows:
        assert float(row["ms_host"]) > 0, row
    [(device, name)] = bulk.pictures("gathers")
    waited = [row["waited_ms"] for row in bulk.read("gathers", device, name).rows]
    assert len(waited) == 4 and min(waited) >= 0


@pytest.mark.parametrize("capture", [False, True])
def test_every_divided_optimizer(capture):
    cells = load_cells("sharded_optimizer", **TINY, capture=capture)
    rows = measured(cells.table, cells.tasks, cells.measure)
    assert len(rows) == (4 if capture else 6)
    for row in rows:
        assert float(row["ms_optimizer"]) > 0, row
    for row in measured(cells.memory_table, cells.memory_tasks, cells.measure_memory, whole=True):
        assert int(row["present_bytes"]) > int(row["parameter_bytes"])
        # Backward runs in a thread of its own, whose calls are to be counted too.
        if row["moment"] == "step" and row["carrier"] == "backend":
            assert int(row["reduced_bytes"]) >= int(row["parameter_bytes"]), row
            gathered = int(row["gathered_bytes"]) + int(row["broadcast_bytes"])
            assert (gathered >= int(row["parameter_bytes"])) is (row["optimizer"] != "plain"), row
