"""Measure memory: how much there is, what a call needs, what a library takes for itself."""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
# Left to the rest of the machine where a computed size decides what is run on the CPU.
_USABLE = 0.8


def peak_bytes(fn: Callable[[], object], *, device: str = "cuda") -> int | None:
    """Return the peak CUDA memory of ``fn()`` in bytes, above what was allocated before the call.

    It counts what tensors occupy, not what the caching allocator keeps in reserve. For
    ``device="cpu"``, or without a CUDA device, returns None and does not call ``fn``. An exception
    of ``fn`` passes through.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    # Garbage that is collected in mid-call would be taken off the peak.
    gc.collect()
    torch.cuda.synchronize()
    at_entry = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - at_entry


def take_workspaces(device: str) -> None:
    """Let cuBLAS take what it keeps, for this thread and for autograd's, so that what is allocated
    from now on is tensors; nothing on "cpu"."""
    if device == "cuda":
        import torch

        x = torch.ones(1, 64, 64, device=device, requires_grad=True)
        (x @ x).sum().backward()


def free_memory(device: str) -> None:
    """Give back what is left on ``device`` that nothing holds; loads no torch."""
    gc.collect()
    if device == "cuda" and "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def clear(device: str) -> None:
    """Leave nothing of what was measured before on the device, cuBLAS's workspaces included."""
    if device == "cuda":
        import torch

        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    free_memory(device)


def requested_bytes(device: str) -> int:
    """Return the bytes that tensors have asked of a GPU's allocator; 0 on the CPU."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def allocated_bytes(device: str) -> int:
    """Return the bytes that a GPU's allocator has given to tensors; 0 on the CPU."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.memory_allocated()


def reset_peaks(device: str) -> None:
    """Have `peak_row` count from now on."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_row(device: str, less: int = 0) -> dict[str, int]:
    """Return the most that tensors asked for since `reset_peaks`, `less` of it being somebody
    else's, and what allocator and driver have for it, as columns of a row; {} on the CPU."""
    if device == "cpu":
        return {}
    import torch

    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "tensor_bytes": stats["requested_bytes.all.peak"] - less,
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "driver_bytes": total - free,
    }


def expandable_segments(on: bool) -> None:
    """Have PyTorch's allocator take memory of the GPU in a range that grows page by page, or in
    blocks again."""
    import torch

    torch.cuda.empty_cache()
    # The public name is the environment's, which is read once; torch renamed this one.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{on}")


def available_bytes() -> int:
    """Host memory a new allocation may take without swapping, less a reserve."""
    return int(_USABLE * min(_free_on_host(), _free_in_container()))


def total_bytes(device: str) -> int:
    """Memory of the GPU in bytes, or what the host has available for ``device`` "cpu"."""
    if device == "cpu":
        return available_bytes()
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def free_bytes(device: str) -> int:
    """Memory nothing holds at present: of the GPU, or of the host for ``device`` "cpu"."""
    if device == "cpu":
        return available_bytes()
    import torch

    return torch.cuda.mem_get_info()[0]


def _free_on_host() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """Return the bytes that the control group still allows: /proc/meminfo is the whole host's."""
    with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        # Cached files count as used, and are dropped for whoever asks.
        cached = re.search(r"^inactive_file (\d+)$", (_GROUP / "memory.stat").read_text(), re.M)
        return max(0, limit - used + (int(cached[1]) if cached else 0))
    return 1 << 62
