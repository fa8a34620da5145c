"""The first step of a process, taken apart by what was done before it.

A process prepares something, builds the model and takes its first steps. What a preparation spares
the first step is what that part of it costs: the library of matrix products (a ``product`` before),
loading kernels, starting autograd and whatever else happens once in a process (a step of a model
with one ``block``), asking the driver for memory (taking nearly all of it and leaving it in the
allocator's cache), loading (all ``modules`` with the context), compiling (code ``cached`` on disk).
The context belongs to no step: a model is on the device before its first.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from a2lib.experiments.benchmark.configurations import LADDER
from a2lib.experiments.steps import Configuration
from a2lib.paths import cache_dir

# Steps of the process, and how many of the last count as steady.
STEPS, STEADY = 10, 5
# Of the free device memory that a preparation takes.
SHARE = 0.9
SIDE = 64
BLOCK = ("block_first", "block_second")


def parts(prepared: str, device: str) -> tuple[str, ...]:
    """The values of the column ``part`` of one process, in order."""
    found = ["import", *(["context"] if device == "cuda" else [])]
    for done in _done(prepared, device):
        found += BLOCK if done == "block" else [done]
    return (*found, "first", "second", "steady")


def timed_parts(
    configuration: Configuration, prepared: str, repeat: int, device: str, seed: int
) -> Iterator[tuple[str, list[float]]]:
    """(part, samples in ms) of a process that has not imported torch, each as it is measured.

    Raises RuntimeError where PyTorch is imported already, since this would then be no first step.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: this is no first step")
    if prepared == "modules":
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    if configuration.compile != "none":
        _caches(repeat, full=prepared == "cached")
    yield "import", [_ms(lambda: __import__("torch"))]
    import torch

    from a2lib.benchmark import run
    from a2lib.lab import synchronize

    if device == "cuda":
        yield "context", [_ms(lambda: (torch.cuda.init(), synchronize(device)))]
    done = _done(prepared, device)
    given = {"warmup": 0, "seed": seed}
    if "product" in done:
        a = torch.ones(SIDE, SIDE, device=device)
        synchronize(device)
        yield "product", [_ms(lambda: (a @ a, synchronize(device)))]
        del a
    if "block" in done:
        one = run(configuration.config(device, steps=2, num_layers=1, **given))
        for name, step in zip(BLOCK, _complete(one), strict=True):
            yield name, [step.wall_ms]
    if "memory" in done:
        size = int(SHARE * torch.cuda.mem_get_info()[0])
        yield "memory", [_ms(lambda: torch.empty(size, dtype=torch.uint8, device=device))]
    steps = _complete(run(configuration.config(device, steps=STEPS, **given)))
    yield "first", [steps[0].wall_ms]
    yield "second", [steps[1].wall_ms]
    yield "steady", [step.wall_ms for step in steps[-STEADY:]]


def cache(repeat: int) -> Path:
    """Where the process with an empty cache leaves what it compiled."""
    return cache_dir() / "first" / str(repeat)


def _done(prepared: str, device: str) -> tuple[str, ...]:
    """What is done before, in order; the ladder has each rung stand on those below."""
    ladder = LADDER[device]
    return ladder[1 : ladder.index(prepared) + 1] if prepared in ladder else ()


def _complete(result) -> list:
    if result.status != "ok":
        raise MemoryError(result.note) if result.status == "oom" else RuntimeError(result.note)
    return result.steps


def _caches(repeat: int, full: bool) -> None:
    """Compiled code goes to a folder that is empty, or that the process with the empty one left.

    Raises RuntimeError where that has not run.
    """
    folder = cache(repeat)
    if full and not folder.is_dir():
        raise RuntimeError("measure what is prepared with nothing first: it fills the cache")
    if not full:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
