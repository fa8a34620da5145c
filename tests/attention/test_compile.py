"""Every kernel of the tile table, compiled for a Hopper GPU on this machine's CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.slow

SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm_90


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("aot.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_there(compiled):
    cells = {(r["kernel"], r["dtype"], r["head_dim"], r["causal"]) for r in compiled}
    for dtype in ("bf16", "fp16", "fp32"):
        for head_dim in (16, 32, 64, 128) if dtype != "fp16" else (64, 128):
            for causal in (True, False):
                kernels = {k for k, *cell in cells if cell == [dtype, head_dim, causal]}
                together = {"forward", "backward_dq", "backward_dkdv"}
                apart = {"forward", "backward_dq", "backward_dk", "backward_dv"}
                assert kernels in (together, apart), (dtype, head_dim, causal, kernels)


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="another compiler, other registers"
)
@pytest.mark.parametrize("resource", ["spills", "serialised"])
def test_no_spills_and_no_serialised_wgmma(compiled, resource):
    bad = [r for r in compiled if r[resource]]
    assert not bad, bad


def test_tensor_cores_and_shared_memory(compiled):
    for r in compiled:
        assert r["shared"] <= SHARED_MEMORY, r
        assert r["wgmma"] or r["mma_sync"], r
        if r["dtype"] != "fp32":
            assert r["wgmma"] and not r["mma_sync"], r
