"""notebooks/fsdp.ipynb: what it asks for, what its ranks measure, and what they refuse.

The wrapper itself is checked in ranks: tests/parallel/checks_fsdp.py.
"""

import committed
import pytest
import torch
from forked import STEPS
from notebook_cells import identities, load_cells

from a2lib.lab import bulk, read_section, sweep
from a2lib.lab.notebook import Run
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


def test_the_sweeps_ask_for_every_published_row(gpus):
    gpus(2)
    cells = load_cells("fsdp", sweep="all")
    asked, of_memory = identities(cells.table, cells.tasks), cells.memory_table
    for name in ("peers", "symm_mem"):
        timed = load_cells("fsdp", sweep=name)
        asked |= identities(cells.table, timed.tasks)
        assert not timed.memory_tasks
    for table, keys in (
        (cells.table, asked),
        (of_memory, identities(of_memory, cells.memory_tasks)),
    ):
        published = {table.identify(row) for row in committed.measured(table.section.name)}
        assert published and published <= keys


def test_what_the_parameters_name(gpus):
    gpus(2)
    [task] = load_cells("fsdp", capture=True, context=64).tasks
    named = [(key["wrapper"], key["context"]) for key in task]
    assert named == [("fsdp", 64), ("fsdp_copies", 64)]
    cells = load_cells("fsdp", wrappers="fsdp2")
    assert [task[0]["wrapper"] for task in cells.memory_tasks] == ["fsdp2"]
    assert [key["wrapper"] for key in cells.tasks[0]] == ["fsdp2"]


def test_what_asks_nccl_is_unsupported_over_gloo(gpus):
    """And copy engines without a GPU; the row says why."""
    gpus(0)
    cells = load_cells("fsdp", wrappers="fsdp_max_ctas_8,fsdp2_symm_mem,fsdp2_symm_gather")
    assert not cells.memory_tasks
    [task] = cells.tasks
    task += [{**task[0], "wrapper": name, "precision": "bf16_weights"} for name in cells.REPLICATED]
    run = Run("fsdp", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, [task], cells.measure, run, ranks=2, device="cpu") == 0
    rows = {row["wrapper"]: row for row in read_section("fsdp")["cpu"]}
    assert len(rows) == len(task) == 5
    assert {row["status"] for row in rows.values()} == {"unsupported"}
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
    [[key, *_]] = cells.tasks
    task = []
    for name in cells.REPLICATED:
        task.append({**key, "wrapper": name, "precision": "bf16_weights"})
    run = Run("fsdp", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, [task], cells.measure, run, ranks=2, device="cpu") == 0
    rows = {row["wrapper"]: row for row in read_section("fsdp")["cpu"]}
    for name in ("ddp_copies", "ddp_updating"):
        assert rows[name]["status"] == "ok", rows[name]
        assert float(rows[name]["ms"]) > 0 and float(rows[name]["ms_without"]) > 0
    assert rows["nobody"]["status"] == "error" and "off their mean" in rows["nobody"]["note"]


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
    run = Run("fsdp", {}, {}, "cpu", "cpu")
    options = {"ranks": 2, "device": "cpu", "whole": True}
    sweep(cells.memory_table, cells.memory_tasks, cells.measure_memory, run, **options)
    rows = {}
    for row in read_section("fsdp_memory")["cpu"]:
        assert (row["status"], row["present_bytes"]) == ("ok", "")
        rows[row["wrapper"], row["step_number"], row["moment"]] = row
    assert len(rows) == 4 * 7
    for held, moment in zip(theory.between(TINY, 2), ("init", "before", "after"), strict=True):
        for wrapper, share in (("fsdp", 1), ("fsdp2", 2 * PARAMETERS / theory.kept(TINY, 2))):
            for part, name in PARTS.items():
                extra = COUNTERS if part == "optimizer" and held.optimizer else 0
                size = int(rows[wrapper, "0", moment][f"{part}_bytes"])
                assert size == pytest.approx(share * held.parts[name] + extra), (wrapper, part)
    # Whole models have two ranks' parameters and gradients; ZeRO-1's optimizer is half of DDP's.
    ddp, zero1 = (rows[wrapper, "0", "after"] for wrapper in ("ddp", "zero1"))
    for part in ("parameter", "gradient"):
        assert ddp[f"{part}_bytes"] == zero1[f"{part}_bytes"] == str(4 * PARAMETERS)
    assert int(ddp["optimizer_bytes"]) == pytest.approx(8 * PARAMETERS + COUNTERS, abs=8)
    assert int(zero1["optimizer_bytes"]) < 0.6 * int(ddp["optimizer_bytes"])
    moments = list(theory.step(TINY, 2, 0, computes=4))
    [last] = [moment for moment in moments if moment.moment == "backward root"]
    assert int(rows["fsdp", "3", "forward"]["whole_bytes"]) == last.gathered
    # Without activations, which a CPU does not tell, and when a unit begins.
    computing = [moment for moment in moments if moment.moment[:4] in ("forw", "back")]
    fullest = max(computing, key=lambda moment: moment.total)
    peak = rows["fsdp", "3", "peak"]
    held = sum(int(peak[f"{part}_bytes"]) for part in (*PARTS, "whole", "travelling"))
    assert held >= fullest.total + COUNTERS


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
    run = Run("fsdp", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, tasks, cells.measure, run, ranks=2, device="cpu") == 0
    rows = {row["wrapper"]: row for row in read_section("fsdp")["cpu"]}
    assert rows["own"]["status"] == "error" and "off their mean" in rows["own"]["note"]
    for name in ("fsdp", "fsdp2", "mine"):
        row = rows[name]
        assert row["status"] == "ok" and row["conditions"].endswith("cores")
        assert float(row["ms"]) > 0 and float(row["ms_without"]) > 0 and int(row["n"]) == STEPS
        assert bool(row["ms_waited"]) is (name != "fsdp2")
    assert ("cpu", "fsdp-tiny-launched-2-ranks") in bulk.pictures("gathers")
    gathers = bulk.read("gathers", "cpu", "fsdp-tiny-launched-2-ranks").rows
    gathered = [("forward", unit) for unit in ("root", "layers.0", "layers.1")]
    gathered.append(("backward", "layers.0"))
    assert [(row["pass"], row["unit"]) for row in gathers] == gathered
    for row in gathers:
        # The CPU gathers before it goes on.
        times = [row[f"{name}_ms"] for name in ("gather_start", "gather_end", "turn")]
        times += [row["compute_start_ms"], row["compute_end_ms"]]
        assert times == sorted(times)
