"""How much memory there is."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Left to the rest of the machine where a computed size decides what is run on the CPU.
_USABLE = 0.8


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
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """What the control group still allows; a container's /proc/meminfo shows the whole host."""
    group = Path("/sys/fs/cgroup")
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
