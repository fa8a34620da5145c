"""Timing, memory and the result store. Importing this needs no torch; measuring does.

Each section of the store has its name in capitals here: ``FLASH`` is ``SECTIONS["flash"]``.
"""

from a2lib.lab.device import device_kind, device_slug, gpu_count, synchronize
from a2lib.lab.lock import DeviceBusy, DeviceLock
from a2lib.lab.memory import peak_bytes
from a2lib.lab.runs import read_runs, start_run
from a2lib.lab.sections import SECTIONS, Section
from a2lib.lab.store import Store, StoreError, read_section
from a2lib.lab.timing import Timing, time_call, time_many

globals().update((name.upper(), section) for name, section in SECTIONS.items())

__all__ = [
    *map(str.upper, SECTIONS),
    "SECTIONS",
    "DeviceBusy",
    "DeviceLock",
    "Section",
    "Store",
    "StoreError",
    "Timing",
    "device_kind",
    "device_slug",
    "gpu_count",
    "peak_bytes",
    "read_runs",
    "read_section",
    "start_run",
    "synchronize",
    "time_call",
    "time_many",
]
