"""The notebooks of several ranks on GPUs: every way of the 8B step, every scheme of a layer."""

import pytest
from notebook_cells import load_cells

from a2lib.lab import bulk, device_slug, gpu_count, read_section, sweep
from a2lib.lab.notebook import Run


@pytest.fixture(autouse=True)
def rows_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))


@pytest.mark.gpu
def test_every_way_on_gpus(tmp_path):
    """In as many processes as there are GPUs for; the losses of all agree."""
    n = min(2, gpu_count())
    size = {"model": "2.7B", "layers": 4, "context": 2048, "room_percent": 75}
    quick = {"warmup_ms": 1, "rep_ms": 1, "cold": False}
    cells = load_cells("leaderboard", world_size=n, **size, **quick)
    slug = device_slug()
    run = Run("leaderboard", {}, {}, "cuda", slug)
    assert sweep(cells.table, cells.tasks, cells.measure, run, ranks=n, device="cuda") == 0
    rows = {row["way"]: row for row in read_section("leaderboard", tmp_path / "data")[slug]}
    assert set(rows) == set(cells.MAKE)
    for row in rows.values():
        assert row["status"] == "ok", row
        for name in ("loss", "gradient_norm"):
            assert float(row[name]) == pytest.approx(float(rows["recomputed"][name]), rel=0.02)
    assert int(rows["offloaded"]["host_bytes"]) > 0 == int(rows["products_kept"]["host_bytes"])
    products_kept = int(rows["products_kept"]["kept_bytes"])
    assert int(rows["offloaded"]["kept_bytes"]) <= products_kept * 1.05
    assert int(rows["own_fsdp"]["kept_bytes"]) < products_kept
    assert len(bulk.pictures("kernels", tmp_path / "data")) == len(rows)


@pytest.mark.gpu
def test_every_scheme_on_gpus(tmp_path):
    """Every scheme, ours and PyTorch's."""
    if gpu_count() < 2:
        pytest.skip("needs two GPUs")
    n = 4 if gpu_count() >= 4 else 2
    size = {"tokens": 512, "d_model": 128, "d_ff": 256, "layers": 3, "world_size": n}
    cells = load_cells("parallelism", **size)
    for scheme in cells.SCHEMES:
        cells.tasks.extend(cells.keys_of(scheme, "torch", 256, [512]))
    slug = device_slug()
    run = Run("parallelism", {}, {}, "cuda", slug)
    assert sweep(cells.table, cells.tasks, cells.measure, run, ranks=n, device="cuda") == 0
    rows = read_section("parallelism", tmp_path / "data")[slug]
    sent = set()
    for row in rows:
        assert row["status"] == "ok", row
        if row["ms_communication"]:
            sent.add((row["scheme"], row["pass"]))
        if (row["scheme"], row["implementation"]) == ("fsdp_tp", "a2lib"):
            assert row["ms_data"] and row["ms_tensor"], row
    assert ("dp", "forward") not in sent and {("dp", "backward"), ("tp", "forward")} <= sent
