"""The smallest model, the command on it, and a played CUDA device."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import memory, profiler

from a2lib.benchmark import Config, workload

SIZES = {"d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 11, "context": 6}
TINY = SIZES | {"batch": 2, "warmup": 1, "steps": 2, "device": "cpu"}


@pytest.fixture
def tiny():
    """A Config of the smallest model; options by name replace its own."""
    return lambda **options: Config(**{**TINY, **options})


@pytest.fixture
def tiny_arguments():
    """The same as options of the command; more follow as given, and a later one wins."""

    def make(*more):
        options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
        return [*options, *map(str, more)]

    return make


@pytest.fixture
def built(monkeypatch):
    """``built(then)``: call ``then(workload)`` whenever one has been built."""

    def watch(then):
        plain = workload.Workload.__init__

        def __init__(self, *args, **options):
            plain(self, *args, **options)
            then(self)

        monkeypatch.setattr(workload.Workload, "__init__", __init__)

    return watch


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The calls so far; forward, backward and build among them. Event times are the host's."""
    monkeypatch.chdir(tmp_path)  # where a history is written
    seen = []

    def note(name, result=None):
        return lambda *args, **kwargs: seen.append(name) or result

    class Event:
        def __init__(self, enable_timing, external):
            assert enable_timing and not external

        def record(self):
            seen.append("event")
            self.at = time.perf_counter()

        def elapsed_time(self, later):
            assert seen[-1] != "event", "read before the device was waited for"
            return (later.at - self.at) * 1e3

    class OnCpu(workload.Workload):
        def __init__(self, config, device, nvtx=None):
            seen.append("build")
            super().__init__(config, "cpu", nvtx)
            self.device = device
            self.model.register_forward_hook(lambda *_: seen.append("forward"))

    plays = {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "get_device_name": lambda: "NVIDIA H200",
        "get_device_properties": lambda: SimpleNamespace(total_memory=1000),
        "synchronize": note("synchronize"),
        "empty_cache": note("empty_cache"),
        "reset_peak_memory_stats": note("reset_peak"),
        "memory_allocated": lambda: 100,
        "memory_reserved": lambda: 200,
        "max_memory_allocated": lambda: 300,
        "max_memory_reserved": lambda: 400,
        "Event": Event,
    }
    for name, play in plays.items():
        monkeypatch.setattr(torch.cuda, name, play)
    # A build for CUDA asks the driver here, and there is none.
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(profiler, "start", note("profile"))
    monkeypatch.setattr(profiler, "stop", note("profiled"))

    def record(enabled="all", **options):
        seen.append("record" if enabled else "recorded")
        assert not enabled or options == {"max_entries": 1_000_000, "stacks": "python"}

    monkeypatch.setattr(memory, "_record_memory_history", record)
    empty = {"segments": [], "device_traces": [[]]}
    monkeypatch.setattr(memory, "_snapshot", lambda: seen.append("snapshot") or dict(empty))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"<{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", note(">"))
    monkeypatch.setattr(workload, "Workload", OnCpu)
    return seen
