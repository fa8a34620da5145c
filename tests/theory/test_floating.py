"""Exact floating point against PyTorch on the CPU, bit for bit, and against numbers by hand."""

import pytest
import torch

from a2lib.theory import floating
from a2lib.theory.floating import FORMATS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("loop", floating.handout_loops(), ids=str)
def test_every_partial_sum_is_pytorchs(loop):
    total = torch.tensor(0, dtype=DTYPES[loop.sum])
    addend = torch.tensor(float(loop.step), dtype=DTYPES[loop.addend])
    sums = []
    for _ in range(loop.terms):
        total += addend.type(DTYPES[loop.sum]) if loop.cast else addend
        sums.append(total.item())
    assert tuple(sums) == loop.partial_sums()


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_pytorchs(name):
    made = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1000,), generator=made).to(torch.int32)
    near = 10 ** (12 * torch.rand(300, generator=made) - 8)  # where fp16 has its numbers
    ties = torch.arange(0, 2**10 + 1) / 2**25  # every second one halfway between subnormals
    numbers = torch.cat([bits.view(torch.float32), near, -near, ties])
    numbers = numbers[numbers.isfinite()]
    finite = overflown = 0
    for number, expected in zip(numbers, numbers.to(DTYPES[name]), strict=True):
        exact = number.item()
        if expected.isfinite():
            assert FORMATS[name].round(exact) == expected.item()
            finite += 1
        else:
            with pytest.raises(OverflowError, match=f"infinite in {name}"):
                FORMATS[name].round(exact)
            overflown += 1
    assert finite > 1500 and (overflown > 150) == (name == "fp16")
