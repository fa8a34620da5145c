"""Device names and peak memory; the arithmetic is tested with a stand-in for torch.cuda."""

import gc
import weakref

import pytest
import torch

from a2lib.measure import device_slug, peak_bytes
from a2lib.measure.device import slugify


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("NVIDIA H100 MIG 1g.10gb ", "nvidia-h100-mig-1g-10gb"),
    ],
)
def test_a_device_name_becomes_a_file_name(monkeypatch, name, slug):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device_slug() == slug == slugify(slug)


class Held:
    """What only the collector frees."""


def test_without_cuda_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_slug() == "cpu"
    assert peak_bytes(lambda: pytest.fail("called")) is None


def test_peak_is_counted_above_what_was_there_at_entry(monkeypatch):
    memory = {"now": 100, "peak": 900}
    log = []

    def reset():
        memory["peak"] = memory["now"]

    def call():
        memory["peak"] = max(memory["peak"], memory["now"] + 70)
        memory["now"] += 30
        log.append("call")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: memory["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory["peak"])
    assert peak_bytes(call) == 70
    assert log == ["synchronize", "call", "synchronize"]
    assert peak_bytes(call, device="cpu") is None
    assert log[3:] == []


def test_garbage_of_before_is_not_taken_off_the_peak(monkeypatch, no_garbage):
    garbage = Held()
    garbage.cycle, held = garbage, weakref.ref(garbage)
    del garbage
    now = {"call": 0, "peak": 0}

    def allocated():
        return now["call"] + (1000 if held() else 0)

    def reset():
        now["peak"] = allocated()

    def call():
        gc.collect()
        now["call"] = 70
        now["peak"] = max(now["peak"], allocated())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now["peak"])
    assert peak_bytes(call) == 70


@pytest.mark.gpu
def test_on_a_gpu_freed_memory_counts_and_earlier_memory_does_not(no_garbage):
    mib = 2**20
    kept = torch.empty(64 * mib, dtype=torch.uint8, device="cuda")

    def call():
        first = torch.empty(32 * mib, dtype=torch.uint8, device="cuda")
        del first
        return torch.empty(16 * mib, dtype=torch.uint8, device="cuda")

    assert peak_bytes(call) == 32 * mib
    assert kept.numel() == 64 * mib
