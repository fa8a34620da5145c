"""Measure, store and resume. Importing this needs no torch; measuring does.

README.md beside this file says how a notebook is written with it.
"""

from a2lib.lab.device import device_kind, device_slug, gpu_count, synchronize
from a2lib.lab.lock import DeviceBusy, device_lock
from a2lib.lab.memory import peak_bytes
from a2lib.lab.notebook import start
from a2lib.lab.parameters import ParameterError, choice, choices, flag, whole, wholes
from a2lib.lab.runs import read_runs, start_run
from a2lib.lab.sections import SECTIONS, Section
from a2lib.lab.store import StoreError, Table, read_section
from a2lib.lab.sweep import sweep
from a2lib.lab.timing import Timing, time_call, time_many

__all__ = [
    "SECTIONS",
    "DeviceBusy",
    "ParameterError",
    "Section",
    "StoreError",
    "Table",
    "Timing",
    "choice",
    "choices",
    "device_kind",
    "device_lock",
    "device_slug",
    "flag",
    "gpu_count",
    "peak_bytes",
    "read_runs",
    "read_section",
    "start",
    "start_run",
    "sweep",
    "synchronize",
    "time_call",
    "time_many",
    "whole",
    "wholes",
]
