"""Run the steps of a configuration and give back what was measured, however it ends."""

import contextlib
import errno
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

from a2lib.experiments.workload.config import PRECISIONS, Config
from a2lib.experiments.workload.ranges import Ranges, RecordFunctions, Stopwatch
from a2lib.experiments.workload.result import Result
from a2lib.lab import synchronize
from a2lib.lab.failures import classify
from a2lib.lab.memory import free_memory

NOTE_LENGTH = 300


def check_here(config: Config) -> str:
    """The device to run on, "cuda" or "cpu".

    Raises ValueError, in one line that names the allowed values, for what this machine or the model
    cannot do: the device, options that need a GPU, the names of attention and checkpointing.
    """
    import torch

    from a2lib.model import causal_attention
    from a2lib.model.checkpointing import strategy

    causal_attention(config.attention)
    strategy(config.checkpointing, config.shape.num_layers)
    there_is_one = torch.cuda.is_available()
    if config.device == "cuda" and not there_is_one:
        raise ValueError("device 'cuda': there is no CUDA device here; allowed is cpu")
    device = config.device or ("cuda" if there_is_one else "cpu")
    others = ", ".join(name for name in PRECISIONS if name != "tf32")
    if device == "cpu":
        needs = {
            "precision 'tf32'": (config.precision == "tf32", others),
            f"nvtx {config.nvtx!r}": (
                config.nvtx != "none" and config.torch_profile is None,
                "none, or any with torch_profile",
            ),
            "capture": (config.capture, "to leave it out"),
            "cuda_profiler": (config.cuda_profiler, "to leave it out"),
            "memory_history": (config.memory_history is not None, "to leave it out"),
        }
        for option, (asked, instead) in needs.items():
            if asked:
                raise ValueError(f"{option} needs a CUDA device; allowed on cpu is {instead}")
    elif config.precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"precision 'tf32' needs a GPU from Ampere on; allowed are {others}")
    return device


def run(
    config: Config, into: Result | None = None, before_step: Callable[[int], object] | None = None
) -> Result:
    """Measure one configuration.

    Running out of memory, or an attention that cannot run here, is a result with that status, which
    keeps the steps before it; its memory is given back. Any other exception passes through, and so
    does KeyboardInterrupt: ``into``, if given, is the result that is filled, and keeps what was
    measured until then with the status interrupted. ``before_step`` is called with 0, 1, ... before
    each measured step and with their number after the last, the device idle.

    While it runs PyTorch's precision of fp32 products is the configuration's. Raises ValueError as
    ``check_here``, and OSError, with the file's name, where a trace or a history cannot be written.
    """
    import torch

    result = Result(config) if into is None else into
    result.device = check_here(config)
    result.device_name = torch.cuda.get_device_name() if result.device == "cuda" else "cpu"
    try:
        with float32_products(config.precision), contextlib.ExitStack() as stack:
            if config.memory_history is not None:
                # Before the model is built, or its parameters would have no event.
                stack.enter_context(_memory_history(config.memory_history))
            _measure(config, result, before_step or (lambda step: None))
    finally:
        # The next run in this process has the memory, and no graph of this one.
        if config.compile or config.compile_blocks:
            torch._dynamo.reset()
        # A device that an error broke refuses this too, and that error is the one to show.
        with contextlib.suppress(RuntimeError):
            free_memory(result.device)
    return result


@contextlib.contextmanager
def _memory_history(path: str) -> Iterator[None]:
    """Write the history of a GPU's allocations to ``path``, for pytorch.org/memory_viz."""
    from torch.cuda import memory

    memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        yield
    finally:
        snapshot = memory._snapshot()
        memory._record_memory_history(enabled=None)
        try:
            Path(path).write_bytes(pickle.dumps(snapshot))
        except OSError as error:  # that of a full device does not say which file
            raise OSError(error.errno, error.strerror, path) from error


def _measure(config: Config, result: Result, before_step: Callable) -> None:
    """Fill ``result``. Once it has returned nothing holds the model."""
    import torch

    nvtx = None
    if config.nvtx != "none":
        nvtx = torch.cuda.nvtx if config.torch_profile is None else RecordFunctions()
    ranges = Ranges(nvtx)
    stopwatch = Stopwatch(result.device, ranges)
    try:
        _run_steps(config, result, stopwatch, nvtx, before_step)
    except KeyboardInterrupt:
        result.status, result.note = "interrupted", f"in {stopwatch.where}"
        raise
    except Exception as error:
        status, _ = classify(error)
        if status == "error":
            raise
        text = " ".join(str(error).split())
        result.status, result.note = status, f"in {stopwatch.where}: {text}"[:NOTE_LENGTH]


def _run_steps(config, result: Result, stopwatch: Stopwatch, nvtx, before_step: Callable) -> None:
    import torch

    from a2lib.experiments.workload.workload import CapturedSteps, Workload
    from a2lib.lab.graphs import CudaGraphs

    with contextlib.ExitStack() as stack:
        if config.capture:
            # The step's own kernels stand before updates beside them, whose stream has priority 0.
            graphs = CudaGraphs(priority=-1 if config.overlaps else 0)
            stack.enter_context(graphs.on_stream())
        with stopwatch.ranges("build"):
            workload = Workload(config, result.device, nvtx)
        for i in range(config.warmup - config.capture):
            result.warmup.append(workload.step(stopwatch, f"warmup {i}"))
        if config.capture:
            # What the allocator keeps from the steps before is not in the peak of the captured one.
            torch.cuda.empty_cache()
        if result.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            stack.callback(_count_memory, result, torch.cuda.memory_allocated())
        step = workload.step
        if config.capture:
            captured = CapturedSteps(workload, stopwatch, graphs, f"warmup {config.warmup - 1}")
            stack.callback(captured.graph.release)
            result.warmup.append(captured.times)
            step = captured.step
        if config.cuda_profiler:
            stack.enter_context(torch.cuda.profiler.profile())
            stack.callback(synchronize, "cuda")
        if config.torch_profile is not None:
            stack.enter_context(_torch_profiler(config.torch_profile, result.device))
        for i in range(config.steps):
            before_step(i)
            result.steps.append(step(stopwatch, f"step {i}"))
        before_step(config.steps)


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Inside, PyTorch's products of float32 are TF32 for ``precision`` "tf32", float32 for others;
    what it was before comes back."""
    import torch

    newer = torch.backends.cuda.matmul
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller uses the newer setting, beside which this one is unreadable
        before = None
    before_newer = newer.fp32_precision
    # The older setting, since Inductor reads it too; it sets the newer one as well.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        if before is None:
            newer.fp32_precision = before_newer
        else:
            torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _torch_profiler(trace: str, device: str) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=activities) as profiler:
        yield
        synchronize(device)
    path = Path(trace)
    if path.is_file():  # an earlier trace would be taken for this one
        path.unlink()
    try:
        profiler.export_chrome_trace(trace)
    except OSError as error:
        raise OSError(error.errno, error.strerror, trace) from error
    if not _is_whole(path):
        raise OSError(errno.ENOSPC, "the trace is cut off", trace)


def _is_whole(path: Path) -> bool:
    """Whether a trace is there and has its end, which PyTorch does not look at; of a packed one
    gzip does."""
    if path.suffix == ".gz" or not path.is_file():
        return path.is_file()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


def _count_memory(result: Result, before: int) -> None:
    """Fill the result's memory with that of the steps since the peaks were set back."""
    import torch

    result.memory = {
        "before_bytes": before,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "total_bytes": torch.cuda.get_device_properties().total_memory,
    }
