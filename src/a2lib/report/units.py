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
    """To so many significant figures, without an exponent: 0.012, 1.2, 12, 1,234.

    Raises ValueError for what is no finite number: a page that says one has asked wrongly.
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
    return Number(f"{digits(value, figures)}\N{NO-BREAK SPACE}{unit}")


def _in(unit: str, size: float = 1) -> Callable[..., Number]:
    """What writes a number in ``unit``, each of so many of what it counts."""

    def written(value: float, figures: int = 2) -> Number:
        return quantity(value / size, unit, figures)

    return written


# Of a time in milliseconds, of bytes, and of a rate in 10^12 operations a second.
ms, us, seconds = _in("ms"), _in("µs", 1e-3), _in("s", 1e3)
mb, gb, mib, gib = _in("MB", 1e6), _in("GB", 1e9), _in("MiB", 2**20), _in("GiB", 2**30)
tflops = _in("TFLOP/s")


def binary(size: float) -> Number:
    """Bytes in the largest of the binary units that they fill."""
    unit = next((n for n in (3, 2, 1) if size >= 1024**n), 0)
    return quantity(size / 1024**unit, ("B", "KiB", "MiB", "GiB")[unit], 3)


def percent(share: float, decimals: int = 0) -> Number:
    text = f"{100 * share:z.{decimals}f}".replace("-", "−")  # z: no minus before a zero
    return Number(f"{text}\N{NO-BREAK SPACE}%")


times = digits  # a ratio, as in "4.2 times as fast"


def count(number: float) -> Number:
    """A whole number with separators of thousands: 16,384."""
    return Number(f"{round(number):,}")


def span(values: Iterable[float], written: Callable[..., Number], *more) -> Number:
    """The least and the most, "40 ms to 66 ms", or the one that both are written as."""
    values = list(values)
    low, high = written(min(values), *more), written(max(values), *more)
    return low if low == high else Number(f"{low} to {high}")
