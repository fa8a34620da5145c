"""Device names, peak memory with a stand-in for torch.cuda, and what is free on the CPU."""

import pytest
import torch

from a2lib.measure import device_slug, memory, peak_bytes
from a2lib.measure.device import slugify


@pytest.mark.parametrize(("name", "slug"), [
    ("NVIDIA H200", "nvidia-h200"),
    ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
    ("NVIDIA H100 MIG 1g.10gb ", "nvidia-h100-mig-1g-10gb"),
])  # fmt: skip
def test_a_device_name_becomes_a_file_name(monkeypatch, name, slug):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device_slug() == slug == slugify(slug)


def test_without_cuda_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_slug() == "cpu"
    assert peak_bytes(lambda: pytest.fail("called")) is None


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


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_free_on_host", lambda: 2**40)
    host = memory.available_bytes()
    files = {"memory.max": 1000, "memory.current": 700, "memory.stat": "anon 1\ninactive_file 200"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert memory.available_bytes() == 0.8 * (1000 - 700 + 200) < host
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == memory.free_bytes("cpu") == host
