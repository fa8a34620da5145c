"""notebooks/parallelism.ipynb: what it asks for, what its ranks measure, and what they refuse.

The schemes themselves are checked in ranks: tests/parallel/checks_feed_forward.py.
"""

import json

import pandas as pd
import pytest
from notebook_cells import flat, load_cells, published, rows_of_two_ranks
from tables import by

from a2lib.paths import ROOT

SMALL = {"tokens": 16, "d_model": 16, "d_ff": 32, "layers": 2}

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_the_sweeps_ask_for_every_published_row(gpus):
    gpus(2)
    asked = set()
    for backend in ("nccl", "gloo"):
        cells = load_cells("parallelism", sweep="all", backend=backend)
        asked.update(map(cells.table.identify, flat(cells.tasks)))
    assert published(cells.table) <= asked


def test_meshes_by_world_size(gpus):
    gpus(0)
    for size, both in {2: [], 4: [(2, 2)], 6: [(3, 2), (2, 3)], 8: [(4, 2), (2, 4)]}.items():
        cells = load_cells("parallelism", world_size=size, tokens=96, d_ff=48)
        assert cells.meshes("fsdp_tp") == both


@pytest.mark.slow
def test_rows_of_ours_pytorchs_and_the_readers_own(gpus):
    gpus(0)
    cells = load_cells("parallelism", **SMALL)
    cells.BUDGET_MS["cpu"] = 1
    cells.MAKE["mine"] = cells.TorchStack
    cells.MAKE["wrong"] = forgetful(cells.MAKE["torch"])
    for scheme in ("dp", "fsdp", "tp"):
        cells.tasks.extend(cells.keys_of(scheme, "torch", 32, [16]))
    for name in ("mine", "wrong"):
        cells.tasks.extend(cells.keys_of("dp", name, 32, [16]))
    rows_of_two_ranks(cells.table, cells.tasks, cells.measure)
    rows = cells.table.frame()
    ours = rows.query("implementation == 'a2lib'")
    assert len(ours) == 9 and (ours["ms_without"] > 0).all() and (ours["n"] >= 5).all()
    is_silent = (ours["scheme"] == "dp") & (ours["pass"] == "forward")
    assert (ours["ms_communication"].isna() == is_silent).all()
    assert ours["conditions"].str.endswith("cores").all() and ours["ms_data"].isna().all()
    torchs = rows.query("implementation == 'torch'")
    assert set(torchs["scheme"]) == {"dp", "fsdp", "tp"} and set(torchs["pass"]) == {"end_to_end"}
    assert set(rows.query("implementation == 'mine'")["pass"]) == {"end_to_end"}
    assert set(rows.query("implementation != 'wrong'")["status"]) == {"ok"}
    wrong = rows.query("implementation == 'wrong'")
    assert set(wrong["status"]) == {"error"}
    assert wrong["note"].str.contains("is off the one process's by").all()


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
    code = "".join(by(notebook["cells"], "id")["layout"]["source"])
    mine = 'LAYOUTS["mine"] = Layout(data=8, context=2, microbatches=16)\nestimates = []'
    namespace = {}
    exec(code.replace("estimates = []", mine), namespace)
    estimates = pd.DataFrame(namespace["estimates"])
    assert list(estimates["layout"]) == [*namespace["LAYOUTS"]]
    assert (0 < estimates["s"]).all() and (estimates["s"] <= estimates["s, none hidden"]).all()
    assert estimates["MFU, 6ND"].between(0, 1, inclusive="neither").all()
    assert estimates["fits"].any()
