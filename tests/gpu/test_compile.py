"""What the cells of notebooks/compile.ipynb measure, on a real GPU at small sizes."""

import pytest
from notebook_cells import load_cells

pytestmark = pytest.mark.gpu

QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}


@pytest.mark.parametrize("written", ["plain", "causal", "heads"])
def test_attention_on_the_gpu(configured, written):
    """In fp32 Inductor recognises none, since the attention it would call uses TF32."""
    cells = load_cells("compile", written=written, seq_len=256, model="none")
    cells.TIMING["cuda"].update(QUICK)
    (keys,) = cells.attention_tasks
    rows = {}
    for row in cells.measure_attention(keys):
        rows[row["implementation"], row["pass"]] = row
    assert len(rows) == len(keys)
    for row in rows.values():
        assert row["ms_graph"] > 0 and row["ms_host"] > 0 and not row.get("note"), row
        assert row["peak_bytes"] > 0, row
    for pass_ in cells.PASSES:
        compiled = rows["compile", pass_]
        assert compiled["ms_cold"] > 0 and compiled["ms_warm"] > 0
        assert compiled["attentions"] == 0


def test_a_model_on_the_gpu():
    cells = load_cells("compile", model="tiny", context=16)
    (keys,) = cells.model_tasks
    rows = {}
    for row in cells.measure_models(keys):
        rows[row["compile"], row["phase"]] = row
        assert "status" not in row and row["n"] == 10, row
        assert row["peak_bytes"] > 0 and row["ms_cold"] > 0, row
    assert len(rows) == len(keys)
    step = rows["model", "step"]
    assert step["ms_cold"] > step["ms_warm"]
