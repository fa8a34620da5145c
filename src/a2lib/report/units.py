"""Measured numbers as text: the one place for units and for rounding.

Two significant digits are the default, for prose; ``figures=3`` suits a table. Each result is text
that a page shows where ``{eval}`` stands, its unit tied to the number by a no-break space.
"""

from __future__ import annotations

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


def ms(time: float, figures: int = 2) -> Number:
    """Milliseconds."""
    return quantity(time, "ms", figures)


def us(time: float, figures: int = 2) -> Number:
    """Microseconds, of a time in milliseconds."""
    return quantity(1e3 * time, "µs", figures)


def seconds(time: float, figures: int = 2) -> Number:
    """Seconds, of a time in milliseconds."""
    return quantity(time / 1e3, "s", figures)


def gb(size: float, figures: int = 2) -> Number:
    """Bytes in units of 10^9."""
    return quantity(size / 1e9, "GB", figures)


def mb(size: float, figures: int = 2) -> Number:
    """Bytes in units of 10^6."""
    return quantity(size / 1e6, "MB", figures)


def gib(size: float, figures: int = 2) -> Number:
    """Bytes in units of 2^30."""
    return quantity(size / 2**30, "GiB", figures)


def mib(size: float, figures: int = 2) -> Number:
    """Bytes in units of 2^20."""
    return quantity(size / 2**20, "MiB", figures)


def binary(size: float) -> Number:
    """Bytes in the largest of the binary units that they fill."""
    unit = next((n for n in (3, 2, 1) if size >= 1024**n), 0)
    return quantity(size / 1024**unit, ("B", "KiB", "MiB", "GiB")[unit], 3)


def tflops(rate: float, figures: int = 2) -> Number:
    """Operations a second, of a rate in 10^12."""
    return quantity(rate, "TFLOP/s", figures)


def percent(share: float, decimals: int = 0) -> Number:
    text = f"{100 * share:.{decimals}f}"
    if not float(text):
        text = text.removeprefix("-")
    return Number(f"{text.replace('-', '−')}\N{NO-BREAK SPACE}%")


def times(ratio: float, figures: int = 2) -> Number:
    """A ratio, as in "4.2 times as fast"."""
    return digits(ratio, figures)


def count(number: float) -> Number:
    """A whole number with separators of thousands: 16,384."""
    return Number(f"{round(number):,}")


def span(values: Iterable[float], written: Callable[..., Number], *more) -> Number:
    """The least and the most, "40 ms to 66 ms", or the one that both are written as."""
    values = list(values)
    low, high = written(min(values), *more), written(max(values), *more)
    return low if low == high else Number(f"{low} to {high}")
