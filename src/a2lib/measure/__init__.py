"""Timing, memory and the result store. Importing this needs no torch; measuring does."""

from a2lib.measure.device import device_slug, synchronize
from a2lib.measure.lock import DeviceBusy, DeviceLock
from a2lib.measure.memory import peak_bytes
from a2lib.measure.runs import read_runs, start_run
from a2lib.measure.sections import (
    ACCUMULATION,
    ATTENTION,
    ATTENTION_LIMIT,
    ATTENTION_SAVED,
    AUTOCAST_DTYPES,
    BENCHMARK,
    BENCHMARK_FIRST,
    BENCHMARK_STEPS,
    CEILING,
    COLLECTIVES,
    COMMON,
    COMPILE_ATTENTION,
    COMPILE_MODEL,
    FLASH,
    FLASH_ACCURACY,
    FLASH_COUNTERS,
    FLASH_PROTOCOL,
    LAYERNORM,
    SECTIONS,
    STATUSES,
    Section,
)
from a2lib.measure.store import Store, StoreError, read_section
from a2lib.measure.timing import Timing, time_call, time_many

__all__ = [
    "ACCUMULATION",
    "ATTENTION",
    "ATTENTION_LIMIT",
    "ATTENTION_SAVED",
    "AUTOCAST_DTYPES",
    "BENCHMARK",
    "BENCHMARK_FIRST",
    "BENCHMARK_STEPS",
    "CEILING",
    "COLLECTIVES",
    "COMMON",
    "COMPILE_ATTENTION",
    "COMPILE_MODEL",
    "FLASH",
    "FLASH_ACCURACY",
    "FLASH_COUNTERS",
    "FLASH_PROTOCOL",
    "LAYERNORM",
    "SECTIONS",
    "STATUSES",
    "DeviceBusy",
    "DeviceLock",
    "Section",
    "Store",
    "StoreError",
    "Timing",
    "device_slug",
    "peak_bytes",
    "read_runs",
    "read_section",
    "start_run",
    "synchronize",
    "time_call",
    "time_many",
]
