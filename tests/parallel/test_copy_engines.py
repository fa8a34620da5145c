"""The mean of the parts: the kernel, in Triton's interpreter, against plain operations. Not in
bfloat16, which the interpreter cuts off where a GPU rounds."""

import os

import pytest
import torch
import triton
import triton.language as tl

from a2lib.parallel import copy_engines, mean_kernel


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="checks_streams.py has it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("mean_dtype", [None, torch.float32])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
def test_the_kernel_is_its_plain_twin(dtype, mean_dtype, world, rank):
    n, block = 100, 64
    parts = torch.randn(world, n + 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    own, others = parts[rank, :n], torch.cat([parts[:rank], parts[rank + 1 :]])[:, :n]
    mean = torch.empty(n, dtype=mean_dtype or dtype)
    wide = tl.float64 if mean.dtype == torch.float64 else tl.float32
    constants = {"RANK": rank, "WORLD": world, "WIDE": wide, "BLOCK": block}
    grid = (triton.cdiv(n, block),)
    mean_kernel._mean_kernel[grid](own, others, mean, n, n + 7, **constants)
    plain = torch.empty_like(mean)
    copy_engines.mean_of_parts(own, others, plain, rank)
    assert torch.equal(mean, plain)
    exact = parts[:, :n].double().mean(0)
    assert torch.allclose(mean.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    if mean.dtype == dtype:
        copy_engines.mean_of_parts(own, others, own, rank)  # in place too
        assert torch.equal(own, mean)
