"""Exact floating point against PyTorch on the CPU, bit for bit, and against numbers by hand."""

from fractions import Fraction

import pytest
import torch

from a2lib.theory import floating
from a2lib.theory.floating import FORMATS, binades, decimal

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("loop", floating.handout_loops(), ids=str)
def test_every_partial_sum_is_pytorchs(loop):
    total = torch.tensor(0, dtype=DTYPES[loop.sum])
    addend = torch.tensor(float(loop.step), dtype=DTYPES[loop.addend])
    sums = []
    for _ in range(loop.terms):
        total += addend.type(DTYPES[loop.sum]) if loop.cast else addend
        sums.append(total.item())
    assert tuple(map(Fraction, sums)) == loop.partial_sums()


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
        exact = Fraction(number.item())
        if expected.isfinite():
            assert FORMATS[name].round(exact) == Fraction(expected.item())
            finite += 1
        else:
            with pytest.raises(OverflowError, match=f"infinite in {name}"):
                FORMATS[name].round(exact)
            overflown += 1
    assert finite > 1500 and (overflown > 150) == (name == "fp16")


@pytest.mark.parametrize("name", DTYPES)
def test_the_limits_are_pytorchs(name):
    found, format_ = torch.finfo(DTYPES[name]), FORMATS[name]
    assert float(format_.largest) == found.max
    assert float(format_.smallest_normal) == found.smallest_normal
    assert float(format_.spacing(Fraction(1))) == found.eps
    tiny = float(format_.smallest)
    assert torch.tensor(tiny, dtype=DTYPES[name]).double().item() == tiny
    assert torch.tensor(tiny / 4, dtype=torch.float64).to(DTYPES[name]).item() == 0


def test_the_parts_of_a_sum_add_up():
    for loop in floating.loops_of(1000, "0.01"):
        sums, parts = loop.partial_sums(), binades(loop)
        assert sum(part.additions for part in parts) == loop.terms - 1
        for part in parts:
            inside = [s for s in sums[:-1] if part.start <= s < 2 * part.start]
            assert part.additions == len(inside)
            assert all((s / part.spacing).denominator == 1 for s in inside)
            assert all((gain / part.spacing).denominator == 1 for gain in part.gains)


@pytest.mark.parametrize("text", ["0", "10", "-6", "0.125", "0.0009765625", str(2**96 + 1)])
def test_decimals_have_every_digit(text):
    assert decimal(Fraction(text)) == text
