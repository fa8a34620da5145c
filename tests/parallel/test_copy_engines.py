"""The means of the parts: the kernel, in Triton's interpreter, against plain operations. Not in
bfloat16, which the interpreter cuts off where a GPU rounds."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from a2lib.parallel.mean_kernel import TENSORS, MeanKernel

sys.path.insert(0, str(Path(__file__).parent))
from checking import PlainMean, parts_of_tensors  # noqa: E402

# More than one launch takes; empty ones, and others that end within a block.
COUNTS = [100, 0, 64, 1, 0, 37, 160, 128, 33, 0]
assert len(COUNTS) > TENSORS


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="checks_streams.py has it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("mean_dtype", [None, torch.float32])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
def test_the_kernel_is_its_plain_twin(dtype, mean_dtype, world, rank):
    tensors, received, layout = parts_of_tensors(COUNTS, world, dtype)
    kernel = MeanKernel(layout, rank, world, torch.device("cpu"), block=64)
    plain = PlainMean(layout, rank, world)
    means = []
    for take in (kernel, plain):
        means.append(torch.full((4096,), -1.0, dtype=mean_dtype or dtype))
        take(tensors, received, means[-1])
    assert torch.equal(*means)
    for i, (x, count) in enumerate(zip(tensors, COUNTS, strict=True)):
        of_ranks, at = [x[layout.own_at[i] :][:count]], layout.means_at[i]
        for other in range(world - 1):
            of_ranks.append(received[layout.received_at[i] + other * layout.rows[i] :][:count])
        exact = torch.stack(of_ranks).double().mean(0)
        mean = means[0][at : at + count].double()
        assert torch.allclose(mean, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        assert (means[0][at + count :][:8] == -1).all()  # nothing is written beside it
    if means[0].dtype == dtype:  # in place too
        whole = torch.zeros(4096, dtype=dtype)
        places = []
        for x, at, begin in zip(tensors, layout.means_at, layout.own_at, strict=True):
            places.append(whole[at : at + len(x) - begin].copy_(x[begin:]))
        within = dataclasses.replace(layout, own_at=[0] * len(COUNTS))
        MeanKernel(within, rank, world, torch.device("cpu"), block=64)(places, received, whole)
        for place, at, count in zip(places, layout.means_at, COUNTS, strict=True):
            assert torch.equal(place[:count], means[0][at : at + count])
