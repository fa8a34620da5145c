"""How the rows of a section are shown: what is compared, along what, and how its columns are named.

A section says it once, in its chapter, and figures, tables and metrics ask here:

    VIEW = View(
        case=("dtype", "size"), by="implementation", along="size",
        looks=Looks(a2lib=Look("a2lib (ours)", "#d55e00", "o", ours=True, short="ours"), ...),
        columns=Columns(size=Column("n", text=style.tokens, axis="numbers added up")),
    )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pandas as pd

from a2lib.report.style import Looks


@dataclass(frozen=True)
class Column:
    """How a key column is written: its ``head`` in a table, a value as ``text`` and, in the title
    of a panel, as ``title``; along the bottom of a figure it is called ``axis``.

    Values that are in ``order`` come first and in that order, the others after them, sorted.
    """

    head: str
    text: Callable[[object], str] = str
    title: Callable[[object], str] | None = None
    axis: str = ""
    order: tuple = ()

    def titled(self, value: object) -> str:
        return (self.title or self.text)(value)

    def values(self, rows: pd.Series) -> list:
        """The values among ``rows``, each once, as they are shown one after another."""
        present = set(rows.dropna())
        return [v for v in self.order if v in present] + sorted(present - set(self.order))


class Columns(dict[str, Column]):
    """The columns of a section by name; one that is not described is written as it is stored."""

    def __missing__(self, name: str) -> Column:
        return Column(name)


@dataclass(frozen=True)
class View:
    """``by`` is the column whose values are compared: a line of a figure, a column of a table each.

    ``case`` are the other key columns: rows that agree in them were measured at the same thing.
    ``along`` is the one that lines run along, whose values double unless ``doubling`` is False.
    """

    case: tuple[str, ...]
    by: str
    along: str
    looks: Looks = field(default_factory=Looks)
    columns: Columns = field(default_factory=Columns)
    doubling: bool = True

    @property
    def ours(self) -> str:
        """The value of ``by`` that is the project's own; "" where none is."""
        return next((name for name, look in self.looks.items() if look.ours), "")

    def shown(self, name: str, rows: pd.DataFrame) -> list:
        """The values of a column among ``rows`` in the order of the view."""
        return self.columns[name].values(rows[name])
