"""Each exception is a status and one line, and what fails leaves the others."""

import pytest
import torch

from a2lib.attention import UnsupportedError
from a2lib.lab import failures
from a2lib.lab.failures import trial


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize("error, status", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB"), "oom"),
    (wrapped(RuntimeError("backend failed"), torch.OutOfMemoryError("no room")), "oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"), "oom"),
    (MemoryError(), "oom"),
    (UnsupportedError("head_dim 256"), "unsupported"),
    (NotImplementedError("only inference"), "unsupported"),
    (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
    (RuntimeError("No valid triton configs. OutOfMemoryError: out of resource"), "unsupported"),
    (ValueError("in /home/someone/x.py\ntwo"), "error"),
])  # fmt: skip
def test_classify(error, status):
    found, note = failures.classify(error)
    assert found == status
    assert "\n" not in note and "/home" not in note and len(note) <= failures.NOTE_LENGTH


def test_the_reason_of_a_refusal_is_in_pytorchs_warnings():
    warned = [
        "Flash attention kernel not used because: (Triggered internally at /pytorch/x.cpp:1.)",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got Float."
        " (Triggered internally at /pytorch/aten/sdp_utils.h:95.)",
        "CuDNN attention has been runtime disabled. (Triggered internally at x)",
    ]
    _, note = failures.classify(RuntimeError("No available kernel. Aborting execution."), warned)
    assert note.startswith("Expected query") and "Triggered" not in note and "CuDNN" not in note


def test_only_a_spoilt_device_is_lost():
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert failures.is_lost(lost) and failures.is_lost(wrapped(ValueError(), lost))
    for error in (ValueError("x"), torch.OutOfMemoryError("CUDA error: out of memory")):
        assert not failures.is_lost(error)


def test_a_trial_that_fails_says_why_and_the_rest_goes_on():
    with trial() as failure:
        result = 1
    assert result == 1 and not failure
    with trial() as failure:
        torch.nn.functional.scaled_dot_product_attention(torch.ones(1), torch.ones(1), None)
    assert failure["status"] == "error" and failure["note"]
    with trial() as failure:
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert failure == {"status": "oom", "note": "out of memory"}


def test_a_trial_takes_the_reason_from_the_warnings_and_lets_a_lost_device_pass():
    q = torch.ones(1, 1, 2, 4)
    with trial() as failure, torch.nn.attention.sdpa_kernel([]):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert failure["status"] == "unsupported" and "kernel" in failure["note"]
    with pytest.raises(failures.LostContext), trial() as failure:
        raise failures.LostContext("gone")
    assert not failure
