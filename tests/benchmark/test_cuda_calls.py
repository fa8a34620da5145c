"""What a run asks of a CUDA device, in which order: a played device, and the model on the CPU."""

import pytest
import torch
from refusals import refused

from a2lib.benchmark import check_here, run, workload


def test_the_order_of_everything(tiny, calls):
    options = {"mode": "inference", "nvtx": "phases", "cuda_profiler": True, "steps": 1}
    result = run(tiny(device="cuda", memory_history="x.pickle", **options))
    step = ["synchronize", "<{} 0", "<forward", "event", "forward", "event", ">", "synchronize"]
    step.append(">")
    assert calls == [
        "record", "<build", "build", ">",
        *(call.format("warmup") for call in step),
        "reset_peak", "profile",
        *(call.format("step") for call in step),
        "synchronize", "profiled", "snapshot", "recorded", "empty_cache",
    ]  # fmt: skip
    assert (result.device, result.device_name) == ("cuda", "NVIDIA H200")
    assert result.memory == {
        "before_bytes": 100, "peak_allocated_bytes": 300, "peak_reserved_bytes": 400,
        "total_bytes": 1000,
    }  # fmt: skip
    (found,) = result.steps
    assert (found.allocated_bytes, found.reserved_bytes) == (100, 200)
    assert {"cuda", "cudnn"} <= set(result.as_dict()["versions"])


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
    assert calls[-4:] == ["profiled", "snapshot", "recorded", "empty_cache"]


def test_tf32_wants_the_hardware_and_is_set(tiny, calls, built, monkeypatch):
    seen, matmul = [], torch.backends.cuda.matmul
    built(lambda _: seen.append((torch.get_float32_matmul_precision(), matmul.allow_tf32)))
    for precision in ("tf32", "fp32"):
        run(tiny(device="cuda", precision=precision, mode="inference"))
    assert seen == [("high", True), ("highest", False)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    line = "needs a GPU from Ampere on; allowed are fp32 and bf16"
    refused(line, check_here, tiny(device="cuda", precision="tf32"))
