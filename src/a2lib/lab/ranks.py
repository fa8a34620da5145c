"""Measure with several ranks together: their devices, their conditions, their times.

backend, device = backend_of(world_size, backend)          # in a notebook's cells
times = time_together({"ms": step}, device, budget_ms=800)  # in `measure`, by every rank
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping

from a2lib.errors import UnsupportedError
from a2lib.lab.device import gpu_count
from a2lib.lab.parameters import ParameterError, choice, whole
from a2lib.lab.timing import RankTimes, from_rest, in_turns, sample_count

MOST_RANKS = 1024
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
# What the times of NCCL's messages depend on.
SWITCHES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_CTA_POLICY",
    "NCCL_CUMEM_ENABLE",
    "NCCL_GRAPH_REGISTER",
)
WARMUP = 3
# The groups that `nccl_group` has made in this process, by their options.
_groups: dict = {}


def backend_of(world_size: int, backend: str = "auto") -> tuple[str, str]:
    """Return the backend of so many ranks of this machine and the device that each of them uses.

    "auto" is nccl where there is a GPU for each rank, else gloo on the CPU. Raises ParameterError
    for another name, or for nccl with fewer GPUs than ranks.
    """
    gpus = gpu_count()
    world_size = whole("world_size", world_size, 1, MOST_RANKS)
    usual = "nccl" if world_size <= gpus else "gloo"
    backend = choice("backend", backend, DEVICES, default=usual)
    if backend == "nccl" and world_size > gpus:
        allowed = f"from 1 to {gpus}, the GPUs here" if gpus else "gloo alone, without a GPU"
        raise ParameterError(f"world_size = {world_size} with backend nccl: allowed: {allowed}")
    return backend, DEVICES[backend]


def nccl_group(**options: int):
    """Return a process group of all ranks whose NCCL communicator has these options, entries of
    ``ProcessGroupNCCL.Options().config``; every rank calls it, and the same options have one group.

    Raises UnsupportedError where the ranks have another backend, or PyTorch knows no such entry.
    """
    import torch
    import torch.distributed as dist

    names = ", ".join(options)
    backend = dist.get_backend()
    if backend != "nccl":
        raise UnsupportedError(f"{names}: an option of NCCL, and these ranks send by {backend}")
    wanted = dist.ProcessGroupNCCL.Options()
    for name, value in options.items():
        if not hasattr(wanted.config, name):
            raise UnsupportedError(f"{name}: torch {torch.__version__} has no such option of NCCL")
        setattr(wanted.config, name, value)
    key = tuple(sorted(options.items()))
    if key not in _groups:
        _groups[key] = dist.new_group(pg_options=wanted)
    return _groups[key]


def conditions(device: str) -> str:
    """Return what times of messages depend on beside what is asked for: the processor and its cores
    on "cpu", those of NCCL's switches that are set on "cuda"."""
    if device == "cuda":
        set_ones = []
        for name in SWITCHES:
            if name in os.environ:
                set_ones.append(f"{name}={os.environ[name]}")
        return ", ".join(set_ones)
    return f"{_processor()}, {cores()} cores"


def cores() -> int:
    """Return how many cores this process may use; all of them on macOS, which does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def time_together(
    calls: Mapping[str, Callable[[], object]],
    device: str,
    *,
    budget_ms: float,
    min_n: int = 5,
    max_n: int = 30,
) -> dict[str, RankTimes]:
    """Time what all ranks do together, each call from where all of them are idle; collective.

    The calls come in turns, so that a drift of the clocks reaches all of them alike; together they
    take about `budget_ms`, each is sampled at least `min_n` and at most `max_n` times.
    """
    from a2lib.parallel.group import everyone

    estimate_ms = 0.0
    for call in calls.values():
        for _ in range(WARMUP):
            last_ms = from_rest(call, device)
        estimate_ms += max(everyone(last_ms))
    n = sample_count(budget_ms, estimate_ms, min_n, max_n)
    samples = defaultdict(list)
    for name, count in in_turns(dict.fromkeys(calls, n)):
        for _ in range(count):
            samples[name].append(from_rest(calls[name], device))
    return {name: RankTimes(everyone(samples[name])) for name in calls}


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return "a processor without a name"
