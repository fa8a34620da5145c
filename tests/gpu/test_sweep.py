"""A sweep on a GPU: what costs a configuration its CUDA context costs the others nothing."""

import sys

import cloudpickle
import pytest
import torch

from a2lib.lab import Table, sweep
from a2lib.lab.notebook import Run

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.gpu
OK = {"ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 3}
PARTS = ("before", "assert", "memory", "capture", "after")


def measure(asked):
    """Play the part that a key names, then use the GPU as a good configuration does."""
    for key in asked:
        x = torch.arange(8, device="cuda")
        if key["part"] == "assert":
            x[torch.tensor([9], device="cuda")].sum().item()
        if key["part"] == "memory":
            torch.empty(2**50, device="cuda")
        if key["part"] == "capture":
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.sum().item()
        assert x.sum().item() == 28
        yield {**key, **OK}


def test_a_lost_context_is_a_row_and_the_rest_is_measured(tmp_path):
    table = Table("toy", "cuda", tmp_path / "data", key="part", values="")
    run = Run("toy", {}, {}, "cuda", "cuda")
    assert sweep(table, [[{"part": part} for part in PARTS]], measure, run) == 0
    statuses, notes = {}, {}
    for row in table.rows():
        statuses[row["part"]] = row["status"]
        notes[row["part"]] = row["note"]
    assert statuses == {
        "before": "ok",
        "assert": "error",
        "memory": "oom",
        "capture": "error",
        "after": "ok",
    }
    assert "assert" in notes["assert"]
