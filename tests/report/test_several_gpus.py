"""The landing page's results of two GPUs, by value."""

import pytest

from a2lib.report.chapters import several_gpus
from a2lib.report.chapters.ddp import Ddp
from a2lib.report.chapters.fsdp import Fsdp
from a2lib.report.tables import MISSING

STEP = {
    "model": "xl25", "batch": 4, "context": 512, "precision": "bf16", "attention": "flash",
    "compile": "blocks", "backend": "nccl", "world_size": 2, "n": 20,
    "ms_host": 3, "conditions": "", "note": "",
}  # fmt: skip


def step(ms, without, capture=False, **over):
    times = {"ms": ms, "ms_without": without} | {f"ms_rank_{x}": ms for x in ("min", "max")}
    spread = {f"{name}_{p}": value for name, value in (("ms", ms), ("ms_without", without))
              for p in ("p20", "p80")}  # fmt: skip
    return STEP | times | spread | {"ms_rank_median": ms, "capture": str(capture).lower()} | over


def averaged(ms, without, capture=False, wrapper="bucketed", bucket_mb=100, **over):
    way = {"wrapper": wrapper, "bucket_mb": bucket_mb, "carrier": "backend", "sent_dtype": "fp32"}
    blank = {"ms_communication": "", "ms_backward_without": "", "sent_bytes": 10**9}
    return step(ms, without, capture, **way | blank | over)


def sharded(ms, without, capture=False, wrapper="fsdp", **over):
    return step(ms, without, capture, wrapper=wrapper, ms_waited="", **over)


@pytest.fixture
def both(synthetic, tmp_path):
    def make(ddp=(), fsdp=()):
        root = synthetic.by_hand(tmp_path, ddp=list(ddp), fsdp=list(fsdp))
        return Ddp([root]), Fsdp([root])

    return make


def cells(chapters):
    frame = several_gpus.results(*chapters, "c", "tab-c").frame
    return {row[0]: row[1:5] for row in frame.values.tolist()}


def test_ours_stands_between_one_gpu_and_pytorch_s(both):
    chapters = both(
        [averaged(82, 70, True), averaged(95, 75), averaged(96, 75, bucket_mb=10),
         averaged(60, 50, True, sent_dtype="bf16"),
         averaged(110, 75, wrapper="torch_ddp", bucket_mb=25)],
        [sharded(84, 72, True), sharded(120, 75), sharded(130, 75, wrapper="fsdp2")],
    )  # fmt: skip
    found = cells(chapters)
    assert found["DDP, the xl of 2025"] == ["70.0 ms", "**82.0 ms**", "95.0 ms", "110 ms"]
    assert found["FSDP, the xl of 2025"] == ["72.0 ms", "**84.0 ms**", "120 ms", "130 ms"]
    assert found["DDP, the xl of 2026 (2.7B)"] == [MISSING] * 4
    behind = several_gpus.behind_results(*chapters)
    assert sorted(behind["ms"]) == [82, 84, 95, 110, 120, 130]


def test_an_update_beside_the_messages_stands_by_one_gpu_that_does_so_too(both):
    updating = averaged(76, 75, True, wrapper="updating", ms_without_updating=71)
    found = cells(both([averaged(82, 70, True), updating]))
    assert found["DDP, the xl of 2025"][:2] == ["71.0 ms", "**76.0 ms**"]


def test_without_rows_the_landing_page_has_no_figure(tmp_path):
    chapters = Ddp([tmp_path]), Fsdp([tmp_path])
    assert set(sum(cells(chapters).values(), [])) == {MISSING}
    assert not len(several_gpus.behind_results(*chapters))
