"""How much memory the CPU needs."""

import sys

import pytest

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Shape
from a2lib.theory.attention import PASSES

SHAPE = Shape("bf16", 1, 4, 1536, 32, True)

# In a fork: the peak of a process never falls, and importing has one.
MEASURING = """
import dataclasses, gc, os, resource, sys
from a2lib.measure import memory
from a2lib.experiments.flash import comparison, turns
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.worker import Job
from a2lib.theory.attention import PASSES
memory.available_bytes = memory.total_bytes = lambda *_: 1 << 60
turns.TIMING["cpu"] = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 1}
def peak_after(shape):
    rows = []
    Job.put = lambda job, *more: rows.extend(more)
    wanted = {"eager": [shape.key("eager", pass_) for pass_ in PASSES]}
    comparison.measure(Job({"shape": dataclasses.asdict(shape)}, "cpu", wanted=wanted))
    assert [row["status"] for row in rows] == ["ok"] * len(PASSES), rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
gc.freeze()  # what is imported is no garbage: each timing looks for some
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
before = peak_after(Shape("bf16", 1, 1, 64, 32, True))  # loads what is loaded once
print(peak_after(SHAPE) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
def test_the_estimate_is_a_bound_within_about_a_factor_of_two(python, monkeypatch):
    # Else glibc keeps a matrix that was freed in its heap, or not, from run to run.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    done = python(MEASURING.replace("SHAPE", repr(SHAPE)))
    out, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    measured = int(out)
    bound = max(peers.host_bytes("eager", SHAPE, p) for p in PASSES)
    assert measured <= bound <= 2 * measured + peers._LIBRARIES, (measured, bound)
