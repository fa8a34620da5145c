"""Errors against float64: known ones come out as they are, and a failure is a row."""

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments.flash import accuracy, peers
from a2lib.experiments.flash.shapes import PUBLISHED, Shape

SHAPE = Shape("fp32", 1, 2, 24, 16, True)


@pytest.fixture
def measured(put):
    def measure(name="eager", score_scale=1):
        rows = put(accuracy.measure, accuracy.task(name, SHAPE, score_scale))
        return {row["tensor"]: row for row in rows}

    return measure


def test_the_errors_are_relative_to_the_truth():
    truth = torch.tensor([3.0, -4.0], dtype=torch.float64)
    row = accuracy.errors(torch.tensor([3.0, -3.5]), truth)
    assert row["status"] == "ok"
    assert row["error"] == pytest.approx(0.5 / 5) and row["error_max"] == pytest.approx(0.5 / 4)
    assert accuracy.errors(torch.tensor([3.0, float("nan")]), truth)["status"] == "error"


@pytest.mark.parametrize("score_scale", accuracy.SCORE_SCALES)
@pytest.mark.parametrize("larger", [0, 0.5])
def test_a_known_error_is_found_in_each_tensor(measured, monkeypatch, larger, score_scale):
    """The reference differs by rounding. Outputs half as large again have an error of a half, and
    so have their gradients."""
    monkeypatch.setattr(
        peers, "build", lambda *_: lambda q, k, v: (1 + larger) * attention_reference(q, k, v, True)
    )
    rows = measured(score_scale=score_scale)
    assert list(rows) == list(accuracy.TENSORS)
    for row in rows.values():
        assert (row["status"], row["score_scale"], row["seq_len"]) == ("ok", score_scale, 24)
        for name in ("error", "error_max"):
            assert 0 < row[name] == pytest.approx(larger, rel=1e-3, abs=1e-4), row


def test_a_backward_that_fails_leaves_the_output(measured, monkeypatch):
    def refuse(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def forward(q, k, v):
        o = attention_reference(q, k, v, True)
        o.register_hook(refuse)
        return o

    monkeypatch.setattr(peers, "build", lambda *_: forward)
    rows = measured()
    assert rows["o"]["status"] == "ok"
    assert {rows[t]["status"] for t in ("dq", "dk", "dv")} == {"oom"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype, score_scale", [("bf16", 1), ("fp16", 10), ("fp32", 1)])
def test_every_peer_on_the_gpu(put, name, dtype, score_scale, configured):
    shape = Shape(dtype, 1, 4, 256, 64, True)
    rows = put(accuracy.measure, accuracy.task(name, shape, score_scale), "cuda")
    assert len(rows) == 4 and not put.raised
    refused = dtype == "fp32" and name in ("sdpa_flash", "sdpa_cudnn")
    for row in rows:
        assert row["status"] == ("unsupported" if refused else "ok"), row
        if not refused:
            assert row["error"] < {"bf16": 0.1, "fp16": 0.1, "fp32": 1e-3}[dtype], row
