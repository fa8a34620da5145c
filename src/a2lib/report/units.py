"""Measured numbers as text: the one place for units and for rounding.

Two significant digits are the default, for prose; ``figures=3`` suits a table. Each result is text
that a page shows where ``{eval}`` stands, its unit tied to the number by a no-break space.
"""

import math
from collections.abc import Callable, Iterable


class Number(str):
    """Text that a notebook's cell and an ``{eval}`` show as it is."""

    def _repr_markdown_(self) -> str:
        return str(self)


def digits(value: float, figures: int = 2) -> Number:
    """Return a number with so many significant figures and no exponent: 0.012, 1.2, 12, 1,234.

    Raises ValueError for a number that is not finite: a page that prints one has asked wrongly.
    """
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number to print")
    if value == 0:
        return Number("0")
    # Rounded first: 0.0999 has its first digit a place higher than it seems.
    rounded = float(f"{value:.{figures - 1}e}")
    decimals = max(0, figures - 1 - math.floor(math.log10(abs(rounded))))
    return Number(f"{value:,.{decimals}f}".replace("-", "−"))


def quantity(value: float, unit: str, figures: int = 2) -> Number:
    """Return a number and its unit, with a no-break space between."""
    return Number(f"{digits(value, figures)}\N{NO-BREAK SPACE}{unit}")


def _writer(unit: str, size: float = 1) -> Callable[..., Number]:
    """Return the function that writes a value in `unit`, which is `size` times the value's own."""

    def write(value: float, figures: int = 2) -> Number:
        return quantity(value / size, unit, figures)

    return write


# A time in milliseconds.
ms = _writer("ms")
us = _writer("µs", 1e-3)
seconds = _writer("s", 1e3)
# A number of bytes.
mb = _writer("MB", 1e6)
gb = _writer("GB", 1e9)
mib = _writer("MiB", 2**20)
gib = _writer("GiB", 2**30)
# A rate in 10^12 operations per second.
tflops = _writer("TFLOP/s")


def percent(share: float, decimals: int = 0) -> Number:
    """Return a share as a percentage: 0.274 as 27 %."""
    text = f"{100 * share:z.{decimals}f}".replace("-", "−")  # z: no minus before a zero
    return Number(f"{text}\N{NO-BREAK SPACE}%")


times = digits  # a ratio, as in "4.2 times as fast"


def count(number: float) -> Number:
    """Return a whole number with separators of thousands: 16,384."""
    return Number(f"{round(number):,}")


def span(values: Iterable[float], write: Callable[..., Number], *options) -> Number:
    """Return the smallest and the largest value, "40 ms to 66 ms", each as `write(value, *options)`
    has it; a single text where both are written alike."""
    values = list(values)
    low = write(min(values), *options)
    high = write(max(values), *options)
    return low if low == high else Number(f"{low} to\N{NO-BREAK SPACE}{high}")
