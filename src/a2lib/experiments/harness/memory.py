"""How much memory there is."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")

# Left to the rest of the machine where a computed size decides what is run on the CPU.
_USABLE = 0.8
# Less than this share of the memory free is running out of it.
_EXHAUSTED = 0.1


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
