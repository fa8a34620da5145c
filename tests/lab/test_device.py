"""A device: clock and power through NVML, the right one's or nothing, and never an exception; its
name, its peak memory, and what is free on the CPU."""

import sys
import threading
import types

import pytest
import torch

from a2lib.lab import device, device_slug, memory, peak_bytes
from a2lib.lab.device import Sensors, Watch, slugify


def nvml(reasons):
    """An NVML that knows two devices, of which torch sees the second, and tells no energy."""
    handles = {"GPU-a": "first", "GPU-b": "second"}
    megahertz = {("second", 1): 1980}  # NVML_CLOCK_SM

    def no_energy(handle):
        raise KeyError("not supported")

    return types.SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: handles[uuid],
        nvmlDeviceGetClockInfo=lambda handle, kind: megahertz[handle, kind],
        nvmlDeviceGetPowerUsage=lambda handle: 698_765,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetTotalEnergyConsumption=no_energy,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
    )


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(module)``: the sensors of the device "b", by this in the place of pynvml."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def make(module):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return Sensors()

    return make


def test_the_device_is_found_by_what_it_is_and_what_it_does_not_tell_is_none(gpu):
    for reasons, capped in ((0, False), (4, True), (1 + 4, True), (1 + 2 + 8 + 32, False)):
        sensors = gpu(nvml(reasons))
        assert sensors.sm_mhz() == 1980 and sensors.power_w() == 698.765
        assert sensors.power_limit_w() == 700 and sensors.energy_j() is None
        assert sensors.capped() is capped


def test_without_nvml_there_is_none(gpu):
    sensors = gpu(None)
    assert sensors.sm_mhz() is sensors.power_w() is sensors.energy_j() is None


def test_a_watch_ends_and_has_what_it_read(monkeypatch):
    class Sensors:
        def sm_mhz(self):
            return 1500

        def power_w(self):
            return 300.0

        def capped(self):
            asked.append(len(asked) == 0)
            if len(asked) == 4:
                seen.set()
            return asked[-1] if len(asked) <= 4 else None

    asked, seen = [], threading.Event()
    monkeypatch.setattr(device, "Sensors", Sensors)
    monkeypatch.setattr(device, "READ_EVERY_S", 0.001)
    with Watch() as watch:
        assert seen.wait(30)
    assert not watch._thread.is_alive() and set(watch.mhz) == {1500}
    assert (watch.power_w(), watch.capped_percent()) == (300.0, 25)


def test_a_device_name_becomes_a_file_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, slug in (
        ("NVIDIA H200", "nvidia-h200"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
        ("NVIDIA H100 MIG 1g.10gb ", "nvidia-h100-mig-1g-10gb"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
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
