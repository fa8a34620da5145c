"""Strips, step bars and timelines: what is drawn is what the tables hold."""

import pandas as pd
import pytest
from svg_sizes import texts

from a2lib.lab import bulk
from a2lib.lab.runs import start_run
from a2lib.report import data, traces
from a2lib.report.page import Missing
from a2lib.report.pages import timeline
from a2lib.report.pages.profile import short_name

STRIP = {"phase": "forward", "part": "ffn", "kind": "matmul", "stream": "7"}


def piece(start, length, **where):
    return STRIP | {"start_us": float(start), "duration_us": float(length)} | where


def test_time_in_which_streams_are_busy_together():
    """A product from 0 to 100 and from 150 to 200 us, and a message from 80 to 160."""
    products, messages = [piece(0, 60), piece(50, 50), piece(150, 50)], [piece(80, 80)]
    assert traces.union(products) == [(0, 100), (150, 200)]
    assert traces.overlap_us(products, messages) == 30
    assert traces.idle_share([*products, piece(0, 999, stream="host")]) == 0.25


@pytest.fixture
def roots(tmp_path):
    """A folder of the project's rows and one of what was measured here, with a picture each."""
    for name, ms in (("project", 1.0), ("here", 2.0)):
        folder = tmp_path / name
        run = start_run(command="", parameters={}, device="nvidia-h200", data=folder)
        row = {"phase": "forward", "part": "ffn", "kind": "matmul", "kernel": "gemm<at::native::x>"}
        row |= {"calls": 1, "ms": ms, "median_us": ms, "share": 1.0}
        for model in ("small", "2.7B"):
            about = {"model": model}
            bulk.put("kernels", "nvidia-h200", model, [row], run=run, about=about, data=folder)
    return [tmp_path / "project", tmp_path / "here"]


def test_pictures_are_those_of_the_rows_device_and_place(roots, monkeypatch):
    monkeypatch.setattr(data, "data_roots", lambda: roots)
    for local, ms in ((False, 1.0), (True, 2.0)):
        rows = pd.DataFrame({"device": ["nvidia-h200"], "local": [local]})
        found = traces.kernels(rows)
        assert list(found["ms"]) == [ms, ms] and set(found["model"]) == {"small", "2.7B"}
        [row] = traces.picture("kernels", rows, model="small")
        assert row["ms"] == ms
        with pytest.raises(Missing, match="kernels of .*large.*none of 2.7B, small"):
            traces.picture("kernels", rows, model="large")
        with pytest.raises(Missing, match="2.7B, small of 2.7B, small"):
            traces.picture("kernels", rows)
    assert not len(traces.kernels(rows.assign(device="nvidia-b200")))
    (roots[0] / "measured" / "runs.csv").unlink()
    with pytest.raises(data.ReportError, match="no run"):
        traces.pictures("kernels", rows.assign(local=False), roots[:1])


def test_a_timeline_marks_its_peak_however_long():
    rows = []
    for i in range(1500):
        row = dict.fromkeys(timeline.CATEGORIES, 0) | {"time_us": i * 100, "parameters": 10**9}
        row["phase"] = "step 0/forward" if i < 800 else "step 0/backward"
        row["saved for backward"] = 10**6 * min(i, 1500 - i)
        row["temporaries"] = 10**9 if i == 777 else i % 7 * 1000
        rows.append(row)
    words = texts(timeline.memory({"": rows}))
    # 1 GB, 1 GB for a moment, and 723 MB: the 777th of 1500 points.
    assert {"peak 2.72 GB", "forward", "backward", "saved for backward"} <= set(words)
    assert "gradients" not in words


@pytest.mark.parametrize(
    ("kernel", "kind", "name"),
    [
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x128x8_stage3",
            "matmul",
            "xmma 64x128 tn",
        ),
        (
            "cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>",
            "matmul",
            "sgemm 256x128 nt",
        ),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "matmul", "nvjet 320x128 nn"),
        ("gemv", "matmul", "matmul"),
    ],
)
def test_a_matmul_is_told_by_family_tile_and_operands(kernel, kind, name):
    assert short_name(kernel, kind) == f"`{name}`"


def test_another_kernel_is_told_by_its_kind():
    assert short_name("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer") == "AdamW"
    assert short_name("softmax_warp_forward", "softmax") == "softmax"
