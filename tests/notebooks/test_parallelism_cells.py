"""notebooks/parallelism.ipynb: what it asks for, what its ranks measure, and what they refuse.

The schemes themselves are checked in ranks: tests/parallel/checks_feed_forward.py.
"""

import json

import committed
import pytest
from notebook_cells import load_cells

from a2lib.lab import read_section, sweep
from a2lib.lab.notebook import Run
from a2lib.paths import ROOT

SMALL = {"tokens": 16, "d_model": 16, "d_ff": 32, "layers": 2}
PASSES = ("forward", "backward", "end_to_end")


pytestmark = pytest.mark.usefixtures("forked_workers")


def measured(cells, tmp_path):
    """Return the rows that two gloo ranks measure of what the cells ask for."""
    run = Run("parallelism", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, cells.tasks, cells.measure, run, ranks=2, device="cpu") == 0
    return read_section("parallelism", tmp_path / "data")["cpu"]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_sweeps_ask_for_every_published_row(gpus, backend):
    gpus(2)
    cells = load_cells("parallelism", sweep="all", backend=backend)
    asked = {cells.table.identify(key) for task in cells.tasks for key in task}
    published = committed.measured("parallelism")
    ours = {cells.table.identify(row) for row in published if row["backend"] == backend}
    assert ours and ours <= asked


def test_meshes_by_world_size(gpus):
    gpus(0)
    for size, both in {2: [], 4: [(2, 2)], 6: [(3, 2), (2, 3)], 8: [(4, 2), (2, 4)]}.items():
        assert (
            load_cells("parallelism", world_size=size, tokens=96, d_ff=48).meshes("fsdp_tp") == both
        )


@pytest.mark.slow
def test_rows_of_ours_pytorchs_and_the_readers_own(gpus, tmp_path):
    gpus(0)
    cells = load_cells("parallelism", **SMALL)
    cells.BUDGET_MS["cpu"] = 1
    cells.MAKE["mine"] = cells.TorchStack
    cells.MAKE["wrong"] = forgetful(cells.MAKE["torch"])
    for scheme in ("dp", "fsdp", "tp"):
        cells.tasks.extend(cells.keys_of(scheme, "torch", 32, [16]))
    for name in ("mine", "wrong"):
        cells.tasks.extend(cells.keys_of("dp", name, 32, [16]))
    rows = measured(cells, tmp_path)
    by_name = {}
    for row in rows:
        by_name.setdefault(row["implementation"], []).append(row)
    assert len(by_name["a2lib"]) == 9
    for row in by_name["a2lib"]:
        assert float(row["ms_without"]) > 0 and int(row["n"]) >= 5
        sends = (row["scheme"], row["pass"]) != ("dp", "forward")
        assert bool(row["ms_communication"]) is sends
        assert row["conditions"].endswith("cores") and row["ms_data"] == ""
    assert {row["scheme"] for row in by_name["torch"]} == {"dp", "fsdp", "tp"}
    for name in ("torch", "mine"):
        assert {row["pass"] for row in by_name[name]} == {"end_to_end"}
    right = [row for name in ("a2lib", "torch", "mine") for row in by_name[name]]
    assert {row["status"] for row in right} == {"ok"}
    for row in by_name["wrong"]:
        assert row["status"] == "error" and "is off the one process's by" in row["note"]
    assert set(cells.table.columns) == set(rows[0])


def forgetful(stack):
    """Return a stack that loses the gradient of one matrix."""

    class Forgetful(stack):
        def gradients(self):
            gradients = super().gradients()
            return {**gradients, "0.w2": 0 * gradients["0.w2"]}

    Forgetful.__module__ = "__main__"  # travels by value, as what a cell defines
    return Forgetful


def test_a_layout_of_the_readers_own_is_estimated():
    notebook = json.loads((ROOT / "notebooks" / "parallelism.ipynb").read_text(encoding="utf-8"))
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == "layout"]
    code = "".join(cell["source"])
    mine = 'LAYOUTS["mine"] = Layout(data=8, context=2, microbatches=16)\nestimates = []'
    namespace = {}
    exec(code.replace("estimates = []", mine), namespace)
    assert [line["layout"] for line in namespace["estimates"]] == [*namespace["LAYOUTS"]]
    for line in namespace["estimates"]:
        assert 0 < line["s"] <= line["s, none hidden"] and 0 < line["MFU, 6ND"] < 1
    assert any(line["fits"] for line in namespace["estimates"])
