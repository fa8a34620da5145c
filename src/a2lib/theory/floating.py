"""Running sums in binary floating point, as they must come out.

A format has ``precision`` significant bits, the leading one included, and exponents from ``emin``
to ``emax`` (IEEE 754-2019, section 3.3; bf16 is fp32 without its last 16 bits). Between two powers
of two its numbers have equal distances, ``spacing``. The result of an addition is rounded to the
nearest number, and to the even one of two that are equally near (section 4.3.1).

Sums are added as Python's floats and rounded to the format. That is exact: a float has
``2 p + 2`` bits or more for each precision p here, where the rounding before changes nothing
(Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30, 1995). For the same reason it
does not matter that PyTorch adds fp16 and bf16 in fp32.
"""

import functools
import math
from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    precision: int
    emin: int
    emax: int

    @property
    def largest(self) -> float:
        """Return the largest finite number."""
        return (2 - 2.0 ** (1 - self.precision)) * 2.0**self.emax

    def spacing(self, x: float) -> float:
        """Return the distance from ``x`` to the next larger number in magnitude."""
        exponent = math.frexp(x)[1] - 1 if x else self.emin
        return 2.0 ** (max(exponent, self.emin) - self.precision + 1)

    def round(self, x: float) -> float:
        """Return the nearest number of this format, or the even one of two equally near ones.

        Raises OverflowError where that is beyond the largest.
        """
        spacing = self.spacing(x)
        rounded = round(x / spacing) * spacing
        if abs(rounded) > self.largest:
            raise OverflowError(f"{x:g} is infinite in {self.name}")
        return rounded


FORMATS = {
    "fp32": Format("fp32", 24, -126, 127),
    "fp16": Format("fp16", 11, -14, 15),
    "bf16": Format("bf16", 8, -126, 127),
}


@dataclass(frozen=True)
class Loop:
    """Add ``terms`` times the decimal ``step``, held in the format ``addend``, to a sum that starts
    at 0 and is held in the format ``sum``.

    With ``cast`` the program converts the addend to the sum's format itself, which adds no rounding
    where the sum's format has all numbers of the addend's.
    """

    sum: str
    addend: str
    terms: int
    step: str
    cast: bool = False

    @property
    def exact(self) -> float:
        """Return the sum without any rounding."""
        return float(self.terms * Decimal(self.step))

    @property
    def held(self) -> float:
        """Return the addend as it is added, rounded to its format."""
        return FORMATS[self.addend].round(float(self.step))

    def partial_sums(self) -> tuple[float, ...]:
        """Return the sums after 1, 2, ... additions."""
        return _partial_sums(self.sum, self.held, self.terms)

    def result(self) -> float:
        """Return the last sum."""
        return self.partial_sums()[-1]


def loops_of(terms: int, step: str) -> tuple[Loop, ...]:
    """Return the handout's four loops, and the same with bf16 instead of fp16."""
    loops = [Loop("fp32", "fp32", terms, step)]
    for low in ("fp16", "bf16"):
        loops.append(Loop(low, low, terms, step))
        loops += [Loop("fp32", low, terms, step, cast) for cast in (False, True)]
    return tuple(loops)


def handout_loops() -> tuple[Loop, ...]:
    """Return the loops for 1,000 times 0.01, the handout's sum, and for 10,000 times 0.001."""
    return loops_of(1000, "0.01") + loops_of(10_000, "0.001")


def decimal(x) -> str:
    """Return ``x`` as a decimal number with all its digits and without an exponent."""
    return f"{Decimal(float(x)):f}"


@functools.lru_cache(maxsize=64)
def _partial_sums(name: str, addend: float, terms: int) -> tuple[float, ...]:
    total, sums = 0.0, []
    for _ in range(terms):
        total = FORMATS[name].round(total + addend)
        sums.append(total)
    return tuple(sums)
