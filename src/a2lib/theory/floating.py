"""Running sums in binary floating point, computed in exact rational arithmetic.

A format has ``precision`` significant bits, the leading one included, and exponents from ``emin``
to ``emax`` (IEEE 754-2019, section 3.3; bf16 is fp32 without its last 16 bits). Between two powers
of two its numbers have equal distances, ``spacing``. The result of an addition is rounded to the
nearest number, and to the even one of two that are equally near (section 4.3.1).

PyTorch adds fp16 and bf16 in fp32 and rounds once more. That changes nothing: fp32 has
``2 p + 2`` bits or more for either p, where a second rounding is harmless (Figueroa, When is double
rounding innocuous?, SIGNUM Newsletter 30, 1995).
"""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    precision: int
    emin: int
    emax: int

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.emax

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest number with all of the precision."""
        return Fraction(2) ** self.emin

    @property
    def smallest(self) -> Fraction:
        """The smallest number above 0, a subnormal one with a single bit."""
        return Fraction(2) ** (self.emin - self.precision + 1)

    def spacing(self, x: Fraction) -> Fraction:
        """Return the distance from ``x`` to the next larger number in magnitude."""
        return Fraction(2) ** (max(_exponent(x), self.emin) - self.precision + 1)

    def round(self, x: Fraction) -> Fraction:
        """Return the nearest number of this format, or the even one of two equally near ones.

        Raises OverflowError where that is beyond the largest.
        """
        spacing = self.spacing(x)
        rounded = round(x / spacing) * spacing
        if abs(rounded) > self.largest:
            raise OverflowError(f"{float(x):g} is infinite in {self.name}")
        return rounded


FORMATS = {
    "fp32": Format("fp32", 24, -126, 127),
    "fp16": Format("fp16", 11, -14, 15),
    "bf16": Format("bf16", 8, -126, 127),
}
PLACES = 60


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
    def exact(self) -> Fraction:
        """The sum without any rounding."""
        return self.terms * Fraction(self.step)

    @property
    def held(self) -> Fraction:
        """The addend as it is added: ``step`` as a double, as Python reads it, then rounded to its
        format."""
        return FORMATS[self.addend].round(Fraction(float(self.step)))

    def partial_sums(self) -> tuple[Fraction, ...]:
        """Return the sums after 1, 2, ... additions."""
        return _partial_sums(self.sum, self.held, self.terms)

    def result(self) -> Fraction:
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


@dataclass(frozen=True)
class Binade:
    """The part of a running sum between two powers of two.

    start: where it begins; it ends at twice that
    spacing: the distance of the format's numbers there
    additions: how many additions began there
    gains: the differences that one addition made, the most frequent first
    """

    start: Fraction
    spacing: Fraction
    additions: int
    gains: tuple[Fraction, ...]


def binades(loop: Loop) -> list[Binade]:
    """Return the loop's additions by the power of two that the sum had reached before each, without
    the first one, before which the sum was 0."""
    gains: dict[Fraction, Counter[Fraction]] = {}
    for before, after in itertools.pairwise(loop.partial_sums()):
        start = Fraction(2) ** _exponent(before)
        gains.setdefault(start, Counter())[after - before] += 1
    spacing = FORMATS[loop.sum].spacing
    parts = []
    for start, counter in gains.items():
        by_frequency = tuple(gain for gain, _ in counter.most_common())
        parts.append(Binade(start, spacing(start), counter.total(), by_frequency))
    return parts


def decimal(x: Fraction) -> str:
    """Return ``x`` as a decimal number with all its digits, at most ``PLACES`` after the point,
    without an exponent and without zeros at the end."""
    places, scaled = 0, x
    while scaled.denominator != 1 and places < PLACES:
        places, scaled = places + 1, scaled * 10
    return f"{Decimal(f'{round(scaled)}E-{places}'):f}"  # scaleb would round to 28 digits


@functools.lru_cache(maxsize=64)
def _partial_sums(name: str, addend: Fraction, terms: int) -> tuple[Fraction, ...]:
    format_, total, sums = FORMATS[name], Fraction(0), []
    for _ in range(terms):
        after = format_.round(total + addend)
        if after == total:  # nor will any later addition change it
            sums += [total] * (terms - len(sums))
            break
        total = after
        sums.append(total)
    return tuple(sums)


def _exponent(x: Fraction) -> int:
    """Return the e of 2**e <= abs(x) < 2**(e + 1), and for 0 less than any format's exponent."""
    if not x:
        return -(10**4)
    n, d = abs(x.numerator), x.denominator
    e = n.bit_length() - d.bit_length()
    return e if n << max(0, -e) >= d << max(0, e) else e - 1
