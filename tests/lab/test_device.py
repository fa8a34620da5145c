"""A device: clock and power through NVML, the right one's or nothing, and never an exception; its
name, its peak memory, and what is free on the CPU."""

import sys
import threading
import types

import pytest
import torch

from a2lib.lab import device, device_slug, memory, peak_bytes
from a2lib.lab.device import Sensors, Watch, slugify


class Error(Exception):
    pass


class FakeNvml(types.ModuleType):
    """An NVML that knows the devices in ``known`` (UUID -> handle) and may refuse."""

    NVMLError = Error
    reasons = 0

    def __init__(self, known, refuses=()):
        super().__init__("pynvml")
        self.known, self.refuses = known, refuses

    def __getattr__(self, name):
        what = name.removeprefix("nvmlDeviceGet")
        readings = {"PowerUsage": 698_765, "EnforcedPowerLimit": 700_000, "nvmlInit": None}
        readings["TotalEnergyConsumption"] = 5_000_250
        readings["CurrentClocksThrottleReasons"] = self.reasons
        if what in self.refuses:
            raise Error(what)
        if what not in readings:
            raise AttributeError(name)
        return lambda *handle: readings[what]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.known:
            raise Error("not found")
        return self.known[uuid]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        if "ClockInfo" in self.refuses:
            raise Error("ClockInfo")
        return {"second": 1980}[handle] if kind == 1 else 0  # NVML_CLOCK_SM


@pytest.fixture
def gpu(monkeypatch):
    """torch sees one device, "b"; ``gpu(known, refuses)`` are its sensors by that NVML."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def make(known, refuses=()):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(known, refuses))
        return Sensors()

    return make


def test_the_device_is_found_by_what_it_is_and_not_by_its_number(gpu, monkeypatch):
    sensors = gpu({"GPU-a": "first", "GPU-b": "second"})
    assert sensors.sm_mhz() == 1980 and sensors.power_w() == 698.765
    assert sensors.energy_j() == 5000.25 and sensors.power_limit_w() == 700
    for reasons, capped in ((0, False), (4, True), (1 + 4, True), (1 + 2 + 8 + 32, False)):
        monkeypatch.setattr(FakeNvml, "reasons", reasons)
        assert sensors.capped() is capped


def read(sensors):
    return (sensors.sm_mhz(), sensors.power_w(), sensors.energy_j(), sensors.power_limit_w())


def test_without_nvml_there_is_none(gpu, monkeypatch):
    gpu({})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read(Sensors()) == (None, None, None, None)


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
