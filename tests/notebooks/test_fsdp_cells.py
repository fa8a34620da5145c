"""notebooks/fsdp.ipynb: what it asks for, what its ranks measure, and what they refuse.

The wrapper itself is checked in ranks: tests/parallel/checks_fsdp.py.
"""

import pytest
import torch
from forked import STEPS
from notebook_cells import identities, load_cells, published, rows_of_two_ranks
from tables import by, values

from a2lib.lab import bulk
from a2lib.shapes import TINY
from a2lib.theory import fsdp as theory
from a2lib.theory.transformer import parameter_count

PARAMETERS = parameter_count(TINY)
# AdamW's counters of steps, 4 bytes for each of the tensors.
COUNTERS = 4 * (2 * 9 + 3)
PARTS = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer"}
# Wrappers of a reader: one is ours, one keeps each rank's own gradients.
OF_A_READER = """
def no_reduction(model, low):
    from a2lib.parallel.fsdp import transfers

    def keep(parts, wholes, group):
        for part, whole in zip(parts, wholes, strict=True):
            part.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])

    transfers.reduce_scatter_coalesced = keep
    return FSDP(model, low)

MAKE["mine"] = lambda model, low: FSDP(model, low)
MAKE["own"] = no_reduction
"""

REPLICATED_BY_GLOO = """
def by_gloo(model):
    return BucketedDDP(model, 100, communication_dtype=torch.bfloat16)

why_not = lambda group, device: ""
REPLICATED.update(ddp_copies=by_gloo, ddp_updating=by_gloo, nobody=lambda model: model)
"""

pytestmark = pytest.mark.usefixtures("forked_workers")


def replicated(cells):
    """Return the keys of replicated models in the setting of the first key."""
    setting = {**cells.tasks[0][0], "precision": "bf16_weights"}
    return [{**setting, "wrapper": name} for name in cells.REPLICATED]


def test_the_sweeps_ask_for_every_published_row(gpus):
    gpus(2)
    cells = load_cells("fsdp", sweep="all")
    asked = identities(cells.table, cells.tasks)
    for name in ("peers", "symm_mem", "update"):
        timed = load_cells("fsdp", sweep=name)
        asked |= identities(cells.table, timed.tasks)
        assert not timed.memory_tasks
    assert published(cells.table) <= asked
    assert published(cells.memory_table) <= identities(cells.memory_table, cells.memory_tasks)


def test_what_the_parameters_name(gpus):
    gpus(2)
    [task] = load_cells("fsdp", capture=True, context=64).tasks
    assert values(task, "wrapper", "context") == [("fsdp", 64), ("fsdp_copies", 64)]
    cells = load_cells("fsdp", wrappers="fsdp2")
    [task], [memory_task] = cells.tasks, cells.memory_tasks
    assert values(task, "wrapper") == ["fsdp2"]
    assert set(values(memory_task, "wrapper")) == {"fsdp2"}


def test_the_updates_take_turns(gpus):
    """On GPUs of both models, captured and launched, over copy engines."""
    gpus(2)
    cells = load_cells("fsdp", sweep="update")
    settings = []
    for task in cells.tasks:
        settings += set(values(task, "model", "capture"))
        assert values(task, "wrapper", "precision") == [
            ("whole_updating", "bf16_weights"), ("fsdp_copies_adamw", "bf16"),
            ("fsdp_copies_master", "bf16"), ("fsdp_copies_updating", "bf16"),
        ]  # fmt: skip
    assert settings == [("xl25", True), ("xl25", False), ("2.7B", True), ("2.7B", False)]


def test_what_asks_nccl_is_unsupported_over_gloo(gpus):
    """And copy engines without a GPU; the row says why."""
    gpus(0)
    cells = load_cells("fsdp", wrappers="fsdp_max_ctas_8,fsdp2_symm_mem,fsdp2_symm_gather")
    assert not cells.memory_tasks
    [task] = cells.tasks
    task += replicated(cells)
    rows = by(rows_of_two_ranks(cells.table, [task], cells.measure), "wrapper")
    assert len(rows) == len(task) == 5
    assert set(values(rows.values(), "status")) == {"unsupported"}
    of_nccl = "an option of NCCL, and these ranks send by gloo"
    assert rows["fsdp_max_ctas_8"]["note"] == f"max_ctas: {of_nccl}"
    assert rows["fsdp2_symm_gather"]["note"] == f"cta_policy: {of_nccl}"
    notes = {f"cta_policy: {of_nccl}"}
    notes.add(f"torch {torch.__version__} has no FSDPModule.set_symm_mem_for_comm()")
    assert rows["fsdp2_symm_mem"]["note"] in notes
    assert "copy" in rows["ddp_copies"]["note"] or "GPU" in rows["ddp_copies"]["note"]


def test_data_parallelism_with_16_bit_weights_is_measured_beside_its_own_update(gpus):
    """Here over gloo, and with gradients that nobody averages."""
    gpus(0)
    cells = load_cells("fsdp", context=8)
    exec(REPLICATED_BY_GLOO, cells.namespace)
    rows = by(rows_of_two_ranks(cells.table, [replicated(cells)], cells.measure), "wrapper")
    for name in ("ddp_copies", "ddp_updating"):
        assert rows[name]["status"] == "ok", rows[name]
        assert float(rows[name]["ms"]) > 0 and float(rows[name]["ms_without"]) > 0
    assert rows["nobody"]["status"] == "error" and "off their mean" in rows["nobody"]["note"]


def test_updates_beside_the_backward_are_measured_beside_those_behind_it(gpus):
    gpus(0)
    cells = load_cells("fsdp", context=8, sweep="update")
    [keys] = cells.tasks
    rows = rows_of_two_ranks(cells.table, cells.tasks, cells.measure)
    assert len(rows) == len(keys) == 4
    without = set()
    for row in rows:
        assert row["status"] == "ok", row
        assert float(row["ms"]) > 0
        assert bool(row["ms_waited"]) is (row["wrapper"] != "whole_updating")
        without.add(row["ms_without"])
    assert len(without) == 1  # all took turns


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_gradients_are_held_against_their_mean(gpus, world, alike):
    """In what ranks have alike, too, and beside roundings of a third of their size."""
    gpus(0)
    cells = load_cells("fsdp")
    each = alike * torch.randn(1, 16, 32) + torch.randn(world, 16, 32)
    mean = each.mean(0)
    gradients = {
        "right": mean,
        "own": each[0],
        "sum": world * mean,
        "divided twice": mean / world,
        "of other rows": mean.roll(8, 0),
    }
    noise = torch.randn(16, 32)
    noise *= mean.norm() / noise.norm()
    for precision, size in (("bf16", 0.33), ("fp32", 1e-3)):
        allowed = torch.tensor(cells.TOLERANCE[precision])
        for name, gradient in gradients.items():
            numbers = cells.deviation(gradient + size * noise, mean, each[0])
            assert bool((numbers <= allowed).all()) is (name == "right"), (name, numbers)
    assert cells.deviation(mean[:0], mean[:0], mean[:0]).tolist() == [0, 0, 0]


@pytest.mark.slow
def test_what_two_ranks_hold_is_what_the_theory_says(gpus):
    """But for AdamW's counters; PyTorch's divides vectors too."""
    gpus(0)
    cells = load_cells("fsdp", context=8)
    asked = cells.memory_table, cells.memory_tasks, cells.measure_memory
    rows = by(rows_of_two_ranks(*asked, whole=True), "wrapper", "step_number", "moment")
    assert set(values(rows.values(), "status", "present_bytes")) == {("ok", "")}
    assert len(rows) == 4 * 7
    for held, moment in zip(theory.between(TINY, 2), ("init", "before", "after"), strict=True):
        for wrapper, share in (("fsdp", 1), ("fsdp2", 2 * PARAMETERS / theory.kept(TINY, 2))):
            for part, name in PARTS.items():
                extra = COUNTERS if part == "optimizer" and held.optimizer else 0
                size = int(rows[wrapper, "0", moment][f"{part}_bytes"])
                assert size == pytest.approx(share * held.parts[name] + extra), (wrapper, part)
    # Whole models have two ranks' parameters and gradients; ZeRO-1's optimizer is half of DDP's.
    ddp, zero1 = rows["ddp", "0", "after"], rows["zero1", "0", "after"]
    for part in ("parameter", "gradient"):
        assert ddp[f"{part}_bytes"] == zero1[f"{part}_bytes"] == str(4 * PARAMETERS)
    assert int(ddp["optimizer_bytes"]) == pytest.approx(8 * PARAMETERS + COUNTERS, abs=8)
    assert int(zero1["optimizer_bytes"]) < 0.6 * int(ddp["optimizer_bytes"])
    held = 0
    for part in (*PARTS, "whole", "travelling"):
        held += int(rows["fsdp", "3", "peak"][f"{part}_bytes"])
    begins = set()
    for moment in theory.step(TINY, 2, 0, computes=4):
        begins.add(moment.moment)
        if moment.moment == "backward root":
            assert int(rows["fsdp", "3", "forward"]["whole_bytes"]) == moment.gathered
        # Without activations, which a CPU does not tell, and when a unit begins.
        if moment.moment.startswith(("forward", "backward")):
            assert held >= moment.total + COUNTERS
    assert "backward root" in begins


@pytest.mark.slow
def test_rows_of_two_ranks_with_wrappers_of_the_readers_own(gpus):
    gpus(0)
    cells = load_cells("fsdp", context=8)
    exec(OF_A_READER, cells.namespace)
    [keys] = cells.tasks
    # Last, since it changes its process; in bf16, whose roundings are larger than in fp32.
    wrong = {**keys[0], "wrapper": "own", "precision": "bf16"}
    right = {**keys[0], "wrapper": "mine", "precision": "bf16"}
    tasks = [keys, [right], [wrong]]
    rows = by(rows_of_two_ranks(cells.table, tasks, cells.measure), "wrapper")
    assert rows["own"]["status"] == "error" and "off their mean" in rows["own"]["note"]
    for name in ("fsdp", "fsdp2", "mine"):
        row = rows[name]
        assert row["status"] == "ok" and row["conditions"].endswith("cores")
        assert float(row["ms"]) > 0 and float(row["ms_without"]) > 0 and int(row["n"]) == STEPS
        assert bool(row["ms_waited"]) is (name != "fsdp2")
    assert ("cpu", "fsdp-tiny-launched-2-ranks") in bulk.pictures("gathers")
    gathers = bulk.read("gathers", "cpu", "fsdp-tiny-launched-2-ranks").rows
    assert values(gathers, "pass", "unit") == [
        ("forward", "root"),
        ("forward", "layers.0"),
        ("forward", "layers.1"),
        ("backward", "layers.0"),
    ]
    for row in gathers:
        # The CPU gathers before it goes on.
        assert row["gather_start_ms"] <= row["gather_end_ms"] <= row["turn_ms"]
        assert row["turn_ms"] <= row["compute_start_ms"] <= row["compute_end_ms"]
