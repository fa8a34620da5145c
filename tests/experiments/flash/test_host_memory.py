"""How much memory the CPU needs."""

import json
import os
import subprocess
import sys

import pytest

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Shape
from a2lib.theory.attention import PASSES

CASES = {"eager": (1, 4, 1536, 32)}

# Each case in a fork of its own: the peak of a process never falls.
MEASURING = """
import dataclasses, gc, json, os, resource, sys
import torch
from a2lib.measure import memory
from a2lib.experiments.flash import comparison
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.worker import Job
from a2lib.theory.attention import PASSES
memory.available_bytes = memory.total_bytes = lambda *_: 1 << 60
comparison.TIMING["cpu"] = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 1}
def measure(name, *sizes):
    rows = []
    Job.put = lambda job, *more: rows.extend(more)
    shape = Shape("bf16", *sizes, True)
    wanted = {name: [shape.key(name, pass_) for pass_ in PASSES]}
    comparison.measure(Job({"shape": dataclasses.asdict(shape)}, "cpu", wanted=wanted))
    assert [row["status"] for row in rows] == ["ok"] * len(PASSES), rows
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
gc.freeze()  # what is imported is no garbage: each timing looks for some
for name, sizes in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        measure(name, 1, 1, 64, sizes[3])  # loads what is loaded once
        before = peak()
        measure(name, *sizes)
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
def test_the_estimate_is_a_bound_within_about_a_factor_of_two():
    # Else glibc keeps a matrix that was freed in its heap, or not, from run to run.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", MEASURING, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    for (name, sizes), measured in zip(CASES.items(), peaks, strict=True):
        shape = Shape("bf16", *sizes, True)
        bound = max(peers.host_bytes(name, shape, p) for p in PASSES)
        assert measured <= bound, (name, measured, bound)
        assert bound <= 2 * measured + peers._LIBRARIES, (name, measured, bound)
