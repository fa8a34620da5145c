"""What the cells of notebooks/flash.ipynb measure, on a real GPU at small sizes."""

import pytest
import torch
from notebook_cells import load_cells

from a2lib.attention.ladder import HOPPER

pytestmark = pytest.mark.gpu

QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}


@pytest.fixture
def cells(configured):
    """``cells(**parameters)``: the notebook's names, with quick timing."""

    def load(**parameters):
        loaded = load_cells("flash", **parameters)
        loaded.TIMING["cuda"].update(QUICK)
        return loaded

    return load


def smaller(keys, heads, seq_len):
    return [{**key, "heads": heads, "seq_len": seq_len} for key in keys]


@pytest.mark.parametrize("dtype, refused", [("bf16", ()), ("fp32", ("sdpa_flash", "sdpa_cudnn"))])
def test_every_implementation_on_the_gpu(cells, dtype, refused):
    """Each is itself, right, and has a peak."""
    notebook = cells(seq_len=512, heads=2, dtype=dtype)
    rows = {}
    for row in notebook.measure(notebook.tasks[0]):
        rows[row["implementation"], row["pass"]] = row
    assert len(rows) == len(notebook.tasks[0])
    for (name, _), row in rows.items():
        if name in refused:
            assert row["status"] == "unsupported" and row["note"], row
        else:
            assert row["ms"] > 0 and row["peak_bytes"] > 0, row
            assert row["ms_graph"] > 0 and row["ms_host"] > 0 and not row.get("note"), row
    eager, ours = rows["eager", "end_to_end"], rows["a2lib", "end_to_end"]
    assert eager["peak_bytes"] > 2 * 512**2 * 2 and ours["peak_bytes"] < eager["peak_bytes"]


@pytest.mark.parametrize("dtype, scale", [("bf16", 1), ("fp16", 10), ("fp32", 1)])
def test_every_error_on_the_gpu(cells, dtype, scale):
    notebook = cells(sweep="leaderboard")
    shape = notebook.shape_of(dtype, 4, 256, 64)
    for name in notebook.usual(shape):
        key = {"implementation": name, **shape, "score_scale": scale}
        keys = [{**key, "tensor": tensor} for tensor in notebook.TENSORS]
        rows = list(notebook.measure_accuracy(keys))
        is_refused = dtype == "fp32" and name in ("sdpa_flash", "sdpa_cudnn")
        for row in rows:
            assert row.get("status", "ok") == ("unsupported" if is_refused else "ok"), row
            if not is_refused:
                assert row["error"] < {"bf16": 0.1, "fp16": 0.1, "fp32": 1e-3}[dtype], row


def test_every_protocol_on_the_gpu(cells):
    notebook = cells(sweep="leaderboard")
    notebook.BOARD_MS.update(warmup=10, rep=100)
    notebook.SUSTAINED["cuda"].update(second_s=0.05, idle_s=0.1)
    kinds, rows = set(), []
    for keys in notebook.other_tasks:
        rows += notebook.measure_protocols(smaller(keys, 2, 512))
    for keys in notebook.first_tasks:
        rows += notebook.measure_first([{**keys[0], "heads": 2, "seq_len": 512}])
    for row in rows:
        assert row.get("status", "ok") == "ok" and row["ms_mean"], row
        kinds.add((row["protocol"], row["implementation"]))
    assert len(kinds) >= 3 + 3 + 4 + 2 + 3 + 2 + 2


@pytest.mark.parametrize("heads, seq_len", [(1, 256), (16, 4096)])
def test_every_rung_on_the_gpu(cells, heads, seq_len):
    notebook = cells(sweep="ladder")
    keys = smaller(notebook.ladder_tasks[-1], heads, seq_len)
    rows = list(notebook.measure_ladder(keys))
    assert len(rows) == len(keys)
    supported = torch.cuda.get_device_capability() == (9, 0)
    for row in rows:
        if supported or row["rung"] not in (*HOPPER, "sdpa_cudnn"):
            assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"], row
