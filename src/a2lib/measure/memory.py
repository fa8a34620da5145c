"""How much memory there is, how much a call needs, and what a library takes for itself."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")

# Left to the rest of the machine where a computed size decides what is run on the CPU.
_USABLE = 0.8
# Less than this share of the memory free is running out of it.
_EXHAUSTED = 0.1


def peak_bytes(fn: Callable[[], object], *, device: str = "cuda") -> int | None:
    """Peak CUDA memory of ``fn()`` above what was allocated when it was entered, in bytes.

    Counts what tensors occupy, not what the caching allocator keeps in reserve. None, without
    calling ``fn``, for ``device="cpu"`` or where there is no CUDA device. An exception of ``fn``
    passes through.
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


class Watch:
    """Whether the memory ran out since this was made, as far as the system tells.

    ``look()`` now and then; ``reason()`` after a process was killed.
    """

    def __init__(self) -> None:
        self._kills = oom_kills()
        self._least = self._total = 0
        self.look()

    def look(self) -> None:
        """Take note of the memory that is free now."""
        free = min(_free_on_host(), _free_in_container())
        self._total = max(self._total, free)
        self._least = min(self._least or free, free)

    def reason(self) -> str:
        """Evidence that a process was killed for want of memory, in words; "" for none."""
        if oom_kills() > self._kills:
            return "the system counts a kill for want of memory"
        if self._least < _EXHAUSTED * self._total:
            return f"{self._least / 2**30:.3g} GiB of memory were left"
        return ""


def oom_kills() -> int:
    """How many processes the system has killed for want of memory: in this control group, of
    version 2 or 1, or where none counts on the whole host."""
    for path in (*_group_files("memory.events"), *_group_files("memory.oom_control")):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.M):
                return int(found[1])
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.M):
            return int(found[1])
    return 0


def _group_files(name: str) -> list[Path]:
    """Where a file of this process's memory control group may lie, the most exact first.

    A container may see its own group as the root, whatever /proc says its name is.
    """
    folders = []
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            root = _ROOT / "memory" if "memory" in controllers.split(",") else _ROOT
            if not controllers or root != _ROOT:
                folders.append(root / inside.strip("/"))
    return [folder / name for folder in (*folders, _ROOT, _ROOT / "memory")]


def _free_on_host() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """What the control group still allows; a container's /proc/meminfo shows the whole host."""
    group = _ROOT
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            # Cached files count as used, and are dropped for whoever asks.
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.M)
            return max(0, int(limit) - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):
        pass
    return 1 << 62
