"""The mean of the parts: the kernel, in Triton's interpreter, against plain operations. Not in
bfloat16, which the interpreter cuts off where a GPU rounds."""

import os

import pytest
import torch
import triton
import triton.language as tl

from a2lib.parallel import copy_engines


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="checks_streams.py has it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
def test_the_kernel_is_its_plain_twin(dtype, world, rank):
    n, block = 100, 64
    parts = torch.randn(world, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = torch.cat([parts[:rank], parts[rank + 1 :]])
    own, plain = parts[rank].clone(), parts[rank].clone()
    wide = tl.float64 if dtype == torch.float64 else tl.float32
    copy_engines._mean_kernel[(triton.cdiv(n, block),)](
        own, others, n, RANK=rank, WORLD=world, WIDE=wide, BLOCK=block
    )
    copy_engines.mean_of_parts(plain, list(others), rank)
    assert torch.equal(own, plain)
    exact = parts.double().mean(0)
    assert torch.allclose(own.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
