"""compute-sanitizer over every form of the attention's kernels on a Hopper GPU.

racecheck does not see all that threads do in shared memory: a race by `stmatrix` and `ldmatrix` it
did not report (Triton 3.6, CUDA 13.0). ``aot.loose_arrivals`` looks for such in the code.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

if __name__ == "__main__":  # what is watched, in a process of its own
    sys.path.insert(0, str(Path(__file__).parents[1]))
from attention_compare import HOPPER_FORMS, with_gradients

from a2lib.attention import FlashAttentionTriton, dispatch, launches

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
        or not Path(SANITIZER).exists(),
        reason="needs a Hopper GPU and compute-sanitizer",
    ),
]
DRIVERS = 1024  # bytes of a block's shared memory that come before the kernel's own
ROLES = 12  # at most, of a kernel's last bytes: one for each warp that waits to be told its role
HAZARD = re.compile(r"hazard detected at __shared__ (0x\w+) .*\n.*\n=+ +\w+ Thread .* at (\w+)\+")
GLUON = re.compile(r"^gluon (\w+) (\d+)$", re.M)


def watched(tool, *args):
    """Return what a tool says of this file run as a program, and what that prints."""
    command = [SANITIZER, "--tool", tool, "--print-limit", "0", "--show-backtrace", "no"]
    if tool == "racecheck":
        command += ["--racecheck-report", "hazard"]
    command += [sys.executable, __file__, *args]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert run.returncode == 0 and "done" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def hazards(said):
    """(offset in shared memory, kernel) of each hazard that racecheck has found."""
    found = []
    for at, kernel in HAZARD.findall(said):
        found.append((int(at, 16) - DRIVERS, kernel))
    counted = re.search(r"(\d+) hazards displayed \((\d+) errors, (\d+) warnings\)", said)
    displayed, errors, warnings = map(int, counted.groups())
    assert len(found) == displayed == errors + warnings
    return found


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_races_are_reported_of_nothing_but_how_triton_hands_out_roles(head_dim, is_causal):
    """By the PTX Triton writes that byte, has all warps of the block meet at a barrier, and reads
    it: the reports are taken to be false. A small kernel whose role waits for copies has them."""
    said = watched("racecheck", str(head_dim), str(int(is_causal)))
    ends = {"forward_kernel": set(), "backward_kernel": set()}
    for kernel, size in GLUON.findall(said):
        ends[kernel].add(int(size))
    assert all(ends.values()), ends
    for at, kernel in hazards(said):
        assert any(end - ROLES <= at < end for end in ends[kernel]), (at, kernel)


def test_a_race_is_reported():
    assert (0, "racing_kernel") in hazards(watched("racecheck", "race"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_memory_is_the_kernels_own(head_dim, is_causal):
    assert "ERROR SUMMARY: 0 errors" in watched("memcheck", str(head_dim), str(int(is_causal)))


def attend(dtype, heads, n, head_dim, is_causal):
    x = torch.randn(4, 1, heads, n, head_dim, device="cuda", dtype=dtype)
    with_gradients(FlashAttentionTriton.apply, *x, is_causal)


COMPILED = []


def attend_in_all_forms(head_dim, is_causal):
    real = launches.compile_and_launch

    def run(step):
        compiled = real(step)
        if compiled is not None and compiled not in COMPILED:
            COMPILED.append(compiled)
        return compiled

    launches.compile_and_launch = run
    for dtype in (torch.bfloat16, torch.float32):
        for heads, n in ((1, 90), (2, 300), (1, 700), (20, 500)):
            attend(dtype, heads, n, head_dim, is_causal)
        torch.use_deterministic_algorithms(True)
        attend(dtype, 2, 301, head_dim, is_causal)
        torch.use_deterministic_algorithms(False)
    launches.n_multiprocessors = lambda _: 5  # so that programs that stay have many turns
    for i, form in enumerate(HOPPER_FORMS):
        if form == (3, True) and head_dim > 64:
            continue  # more shared memory than there is
        stays = form[1] and not (is_causal and head_dim > 64)
        dispatch.forward_consumers = lambda _, found=form: found
        dispatch.hopper_backward_stays = lambda *_, found=stays: found
        attend(torch.bfloat16, 20, 501 + i, head_dim, is_causal)
    dispatch.in_chunks, dispatch.chunk_queries_of = lambda *_: True, lambda _: 128
    attend(torch.bfloat16, 2, 520, head_dim, is_causal)
    for compiled in COMPILED:
        if "ttg.warp_specialize" in compiled.asm["ttgir"]:
            print("gluon", compiled.metadata.name, compiled.metadata.shared)


@gluon.jit
def _write(place, X):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    place.store(gl.load(X + at))


@gluon.jit
def _read(place, X):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(X + gl.arange(0, 128, layout), place.load(layout))


@gluon.jit
def racing_kernel(X):
    """One role writes what another reads, and neither waits: 8 bytes each, which no matrix
    instruction moves."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    place = gl.allocate_shared_memory(gl.float64, [128], layout)
    gl.warp_specialize([(_write, (place, X)), (_read, (place, X))], [4], [64])


if __name__ == "__main__":
    if sys.argv[1] == "race":
        racing_kernel[(1,)](torch.zeros(128, dtype=torch.float64, device="cuda"), num_warps=4)
    else:
        attend_in_all_forms(int(sys.argv[1]), sys.argv[2] == "1")
    torch.cuda.synchronize()
    print("done")
