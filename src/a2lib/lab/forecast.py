"""Say before a sweep that takes minutes on a CPU how long it takes, and what makes it smaller.

The handout's sizes are a GPU's. The estimate is of the operations that a row's key stands for, at
the rate of a matrix product on this CPU, or several times slower (`SLOWER`). Once rows are there
the progress bar knows better.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from a2lib.lab.progress import say
from a2lib.shapes import MODELS
from a2lib.theory.attention import attention_flops
from a2lib.theory.transformer import step_flops

Key = Mapping[str, object]

LONG_S = 60
# What a CPU does in so few seconds that its rate need not be known.
QUICK_FLOPS = 1e11
# Each is called to be checked or compiled, to warm up, and to be timed.
CALLS = 3
# Of an attention as many times as notebooks/flash.ipynb has it at least.
ATTENTION_CALLS = 7
# How many times slower than one product they compute, about, at 8,192 tokens on two cores: the one
# writes and reads matrices, the other launches a handful of kernels a tile from Python.
SLOWER = {"eager": 4, "tiled": 16}
# A step is one measurement, whichever of its rows are asked for.
PARTS_OF_A_STEP = ("phase", "step_number", "moment", "part", "repeat")


def forecast(tasks: Iterable[Sequence[Key]], device: str) -> None:
    """Say in the running cell and on the terminal how long `tasks` take about on the CPU, where
    that is a minute or more; say nothing of another device, or of keys without known sizes."""
    if device != "cpu":
        return
    cases = {_case(key): key for task in tasks for key in task}
    flops = {case: flops_of(key) for case, key in cases.items()}
    work = {
        case: flops[case] * SLOWER.get(key.get("implementation"), 1) for case, key in cases.items()
    }
    if sum(work.values()) < QUICK_FLOPS:
        return
    seconds = sum(work.values()) / flops_per_s()
    if seconds >= LONG_S:
        largest = cases[max(work, key=work.__getitem__)]
        tflop = sum(flops.values()) / 1e12
        say(
            f"This takes about {in_words(seconds)} or more on this CPU ({tflop:,.1f} TFLOP)."
            f" Smaller: {smaller(largest, seconds)}"
        )


def say_if_busy(device: str) -> None:
    """Say before a sweep on the CPU that others work on it: of the last minute more than it has
    cores. Their share is in the times then."""
    load, total = os.getloadavg()[0], os.cpu_count() or 1
    if device == "cpu" and round(load) > total:
        say(f"The machine is busy (load {load:.0f} on {total} cores): times will be of that.")


def _case(key: Key) -> tuple:
    return tuple((name, value) for name, value in key.items() if name not in PARTS_OF_A_STEP)


def flops_of(key: Key) -> float:
    """Return the floating-point operations of measuring a row, 0 where its key does not tell."""
    if {"seq_len", "head_dim", "batch"} <= key.keys():
        sizes = key["batch"], key.get("heads", 1), key["seq_len"], key["seq_len"], key["head_dim"]
        pass_ = key.get("pass", "end_to_end")
        return ATTENTION_CALLS * attention_flops(*sizes, key.get("causal", False), pass_)
    if {"model", "context", "batch"} <= key.keys() and key["model"] in MODELS:
        shape = MODELS[key["model"]]
        if key.get("layers"):
            shape = replace(shape, num_layers=key["layers"])
        # The batch is one rank's, and the ranks share the cores.
        calls = CALLS + key.get("warmup", 0)
        step = step_flops(shape, key["batch"], key["context"])
        return calls * key.get("world_size", 1) * step
    return 0


def flops_per_s(size: int = 1024) -> float:
    """Return the rate of an fp32 matrix product on this CPU, the best of three."""
    import torch

    a = torch.ones(size, size)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times)


def smaller(key: Key, seconds: float) -> str:
    """Return the parameter that brings a row of this key below a minute, as papermill takes it."""
    if "model" in key and key["model"] != "tiny":
        return "-p model tiny, or a smaller context or batch"
    name, power = ("context", 1) if "model" in key else ("seq_len", 2)
    length = key[name]
    while length > 16 and seconds >= LONG_S:
        length, seconds = length // 2, seconds / 2**power
    return f"-p {name} {length}"


def in_words(seconds: float) -> str:
    """Return a length of time in the unit that one would say it in."""
    for unit, length in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else "a minute"
