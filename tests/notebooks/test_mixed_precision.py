"""notebooks/mixed_precision.ipynb on the CPU: what its cells ask for, compute and store."""

import pytest
from notebook_cells import identities, load_cells, published, run_cells
from tables import values


def test_every_committed_row_is_asked_for():
    cells = load_cells("mixed_precision")
    assert identities(cells.sums, [cells.sum_keys()]) == published(cells.sums)
    assert identities(cells.dtypes, cells.dtype_tasks) == published(cells.dtypes)
    assert identities(cells.parts, cells.part_tasks()) == published(cells.parts)


def test_rows_are_stored_and_a_readers_own_with_them(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    mine = 'MAKE["mine"] = lambda x, exact, eps: (x.float().mean(), x.double().mean())'
    wrong = 'MAKE["wrong"] = lambda x, exact, eps: (x.mean() + 1, x.double().mean())'
    added = {
        "sums-cases": 'loops.append(Loop("fp16", "bf16", 50, "0.02"))',
        "layernorm-cases": f"{mine}\n{wrong}",
    }
    cells = run_cells("mixed_precision", added, terms=50, features=16)
    sums = cells.sums.frame(cells.sum_keys())
    assert len(sums) == 8 and set(sums["status"]) == {"ok"}
    assert list(sums["computed"]) == [float(loop.result()) for loop in cells.loops]
    assert len(cells.dtypes.rows()) == 39
    parts = cells.parts.frame().set_index("quantity")
    assert set(parts.loc["mine", "status"]) == {"ok"} and len(parts.loc["mine"]) == 15
    assert set(parts.loc["wrong", "status"]) == {"error"}
    assert "and should be" in parts.loc["wrong", "note"].iloc[0]
    assert len(parts) == 137 + 2 * 15 and set(parts["status"]) == {"ok", "error"}


@pytest.mark.parametrize("low", ["none", "fp16", "bf16"])
def test_dtypes_under_the_cpus_autocast(low):
    cells = load_cells("mixed_precision")
    keys = [{"autocast": low, "quantity": name} for name in cells.TENSORS]
    observed = dict(values(cells.measure_dtypes(keys), "quantity", "observed"))
    if low == "none":
        assert observed == dict.fromkeys(cells.TENSORS, "fp32")
        return
    wide = ["fc1.weight", "loss: cross-entropy"]
    wide += ["gradient of fc1.weight", "gradient of ln.weight", "gradient of fc2.weight"]
    assert observed == dict.fromkeys(cells.TENSORS, low) | dict.fromkeys(wide, "fp32")


@pytest.mark.gpu
def test_on_a_gpu_layer_norm_gives_fp32():
    cells = load_cells("mixed_precision")
    (row,) = cells.measure_dtypes([{"autocast": "fp16", "quantity": "ln output"}])
    assert row["observed"] == "fp32"


def computed(quantity, setting, dtype, features=2560, seed=0):
    cells = load_cells("mixed_precision", features=features, seed=seed)
    key = {"quantity": quantity, "setting": setting, "dtype": dtype, "features": features}
    (row,) = cells.measure_parts([key])
    return float(row["computed"]), float(row["truth"])


def test_the_variance_is_lost_in_one_pass_and_kept_in_two():
    for dtype in ("fp16", "bf16"):
        value, truth = computed("variance, one pass", "mean 100", dtype)
        assert abs(value - truth) > 0.5 * truth
        for quantity in ("variance, two passes", "variance, one pass in fp32"):
            value, truth = computed(quantity, "mean 100", dtype)
            assert value == pytest.approx(truth, rel=0.02)
