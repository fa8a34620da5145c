"""Every kernel of the tile table and of Gluon, compiled for a Hopper GPU on this machine's CPU.

Where there is a GPU, on which tiles are chosen, every tile and every end of a row; elsewhere one
tile of each kernel and larger head size, as a compilation takes seconds: `aot.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from a2lib.attention.tiles import ROWS

pytestmark = pytest.mark.slow

SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm_90
HALF = 113 * 1024  # where two blocks share a multiprocessor
EVERY = torch.cuda.is_available()

KNOWN = triton.__version__.startswith("3.6.")
known_compiler = pytest.mark.skipif(not KNOWN, reason="another compiler, other registers")


@pytest.fixture(scope="module")
def everything():
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("aot.py")
    done = subprocess.run(
        [sys.executable, script, *([] if EVERY else ["some"])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def compiled(everything):
    """Return the kernels of the tile table."""
    found = list(filter(lambda told: "kernel" in told and "gluon" not in told, everything))
    assert {told["kernel"] for told in found} == {row.kernel for row in ROWS}
    return found


@pytest.fixture
def gluon(everything):
    found = list(filter(lambda told: "gluon" in told, everything))
    assert {told["kernel"] for told in found} == {"forward", "backward"}
    return found


@known_compiler
def test_no_serialised_wgmma_and_few_spills(compiled):
    for r in compiled:
        assert not r["serialised"], r
        # These tiles are faster than those that spill nothing.
        few = (r["kernel"], r["head_dim"]) in (("backward", 64), ("backward_chunks", 128))
        allowed = {"bf16x6": 1024, "fp16x3": 192}
        assert r["spills"] <= allowed.get(r["precision"], 96 * few), r


def test_tensor_cores_and_shared_memory(compiled):
    for r in compiled:
        assert r["shared"] <= SHARED_MEMORY, r
        assert r["wgmma"] or r["mma_sync"], r
        if r["precision"] != "bf16x6":
            # Of fewer than 64 rows a warpgroup can make no product, unless it is turned.
            wide, narrow = r["tile"][0] > 16, min(r["tile"][:2]) == 16
            narrow |= r["kernel"] == "backward_chunks" and r["tile"][1] < 64
            assert (r["wgmma"], r["mma_sync"]) == (wide, narrow), r
        # Sums are added up four at a time.
        assert r["adds"] == (r["kernel"] in ("backward_chunks", "backward_wide")), r


@known_compiler
def test_gluon_keeps_its_sums_in_registers(gluon):
    for r in gluon:
        # The backward spills some scalars; times on a GPU did not change with them.
        allowed = 96 if r["kernel"] == "backward" else 0
        if "ordered" in r:  # more, and faster than two sweeps all the same
            allowed = 128 if r["head_dim"] == 64 else 384
        assert r["spills"] <= allowed and not r["serialised"], r


def test_a_warpgroup_meets_before_a_thread_of_it_arrives(gluon):
    for r in gluon:
        as_it_is, without_meeting = r["loose"]
        assert as_it_is == 0 and (without_meeting > 0 or r["kernel"] == "forward"), r


def test_gluon_uses_what_it_is_for(gluon):
    for r in gluon:
        # Two programs of one consumer share a multiprocessor.
        assert r["shared"] <= (HALF if r.get("form", [0])[0] == 1 else SHARED_MEMORY), r
        assert r["wgmma"] and not r["mma_sync"], r
        assert r["reduce"] == (r["kernel"] == "backward"), r
        if KNOWN and r["kernel"] == "backward":
            wide = "st.shared.v4.b32" in r["moves"]  # permuted
            assert wide == (r["head_dim"] == 128), r
