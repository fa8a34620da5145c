"""What a run asks of a CUDA device, in which order: a played device, and the model on the CPU."""

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import memory, profiler

from a2lib.benchmark import check_here, run, workload


@pytest.fixture
def calls(monkeypatch):
    """The calls so far; forward, backward and build among them. Event times are the host's."""
    seen = []

    def note(name, result=None):
        return lambda *args, **kwargs: seen.append(name) or result

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

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
    monkeypatch.setattr(profiler, "start", note("profile"))
    monkeypatch.setattr(profiler, "stop", note("profiled"))

    def record(enabled="all", **options):
        seen.append("record" if enabled else "recorded")
        assert not enabled or options == {"max_entries": 1_000_000, "stacks": "python"}

    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: seen.append(f"dump {path}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"<{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", note(">"))
    monkeypatch.setattr(workload, "Workload", OnCpu)
    return seen


def test_the_order_of_everything(tiny, calls):
    options = {"mode": "inference", "nvtx": "phases", "cuda_profiler": True, "steps": 1}
    result = run(tiny(device="cuda", memory_history="x.pickle", **options))
    step = [
        "synchronize",
        "<{} 0",
        "<forward",
        "event",
        "forward",
        "event",
        ">",
        "synchronize",
        ">",
    ]
    assert calls == [
        "record", "<build", "build", ">",
        *(call.format("warmup") for call in step),
        "reset_peak", "profile",
        *(call.format("step") for call in step),
        "synchronize", "profiled", "dump x.pickle", "recorded", "empty_cache",
    ]  # fmt: skip
    assert (result.device, result.device_name) == ("cuda", "NVIDIA H200")
    assert result.memory == {
        "before_bytes": 100, "peak_allocated_bytes": 300, "peak_reserved_bytes": 400,
        "total_bytes": 1000,
    }  # fmt: skip
    (found,) = result.steps
    assert (found.allocated_bytes, found.reserved_bytes) == (100, 200)
    assert {"cuda", "cudnn"} <= set(result.versions)


@pytest.mark.parametrize("sync, waits", [("step", 2), ("phase", 6)])
def test_each_phase_lies_between_its_events(tiny, calls, sync, waits):
    result = run(tiny(device="cuda", warmup=0, steps=1, sync=sync))
    assert calls.count("event") == 8
    assert calls.count("synchronize") == waits
    (step,) = result.steps
    assert 0 < sum(step.ms.values()) <= step.total_ms <= step.wall_ms
    assert all(step.host_ms[name] >= ms for name, ms in step.ms.items())


def test_an_annotated_model_does_not_outlive_its_run(tiny, calls, monkeypatch):
    """Its modules and their wrapped forwards hold each other, which only the collector ends."""
    models = []
    plain = workload.Workload.__init__

    def watch(self, *args):
        plain(self, *args)
        models.append(weakref.ref(self.model))

    monkeypatch.setattr(workload.Workload, "__init__", watch)
    gc.disable()
    try:
        run(tiny(device="cuda", nvtx="modules", mode="inference", warmup=0, steps=1))
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_whatever_ends_a_run_the_files_are_written(tiny, calls, monkeypatch, error):
    plain = workload.Workload.step

    def step(self, stopwatch, name):
        if name == "step 1":
            raise error
        return plain(self, stopwatch, name)

    monkeypatch.setattr(workload.Workload, "step", step)
    config = tiny(device="cuda", cuda_profiler=True, memory_history="x.pickle")
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run(config)
    else:
        result = run(config)
        assert (result.status, len(result.steps)) == ("oom", 1)
        assert result.memory["peak_allocated_bytes"] == 300
    assert calls[-4:] == ["profiled", "dump x.pickle", "recorded", "empty_cache"]


def test_tf32_wants_the_hardware_and_is_set(tiny, calls, monkeypatch):
    seen = []
    plain = workload.Workload.__init__

    def watch(self, *args):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        plain(self, *args)

    monkeypatch.setattr(workload.Workload, "__init__", watch)
    for precision in ("tf32", "fp32"):
        run(tiny(device="cuda", precision=precision, mode="inference"))
    assert seen == [("high", True), ("highest", False)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match="needs a GPU from Ampere on; allowed are fp32 and bf16"):
        check_here(tiny(device="cuda", precision="tf32"))


def test_a_gpu_is_taken_where_there_is_one(tiny, calls):
    assert check_here(tiny(device=None)) == "cuda"
    assert check_here(tiny()) == "cpu"
