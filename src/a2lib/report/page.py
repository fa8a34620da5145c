"""Write a page of the book: rows, numbers in the text, claims, tables.

    page = Page("sorting", columns)     # its section, and the function that derives columns
    t = page.rows                       # of the published device: a pandas table
    best = one(t, operation="quick", size=1024)

    @page.claim("Quicksort has the lowest peak")
    def quicksort_has_the_lowest_peak(t):
        ...

A person writes the text about the published rows, each number as ``{eval}`gb(best.peak_bytes)` ``.
A sentence that a measurement could refute is a claim: if the published rows do not support it, the
build fails and names it. The same claims are answered on the reader's rows: yes, no, or not
measured (``Page.your_machine``).
"""

import keyword
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from a2lib.lab.sections import SECTIONS
from a2lib.report import data, provenance, style
from a2lib.report.tables import Markdown, Table, folded

LEVEL = 1.02
OPEN_LINES = 8  # a table of more lines is folded away
# What derived columns and claims raise where some of a reader's rows are not there.
LACKING = LookupError, AttributeError, NameError, ValueError, TypeError, ArithmeticError

Derive = Callable[[pd.DataFrame, Callable[[str], pd.DataFrame]], pd.DataFrame]


class ClaimError(AssertionError):
    """A sentence of the book that its rows do not support."""


class Missing(LookupError):
    """There is no row, or several, where a text or a claim needs exactly one."""


@dataclass(frozen=True)
class Claim:
    """A sentence about rows of ``sections``; ``holds(*tables)`` says whether they support it."""

    words: str
    holds: Callable[..., bool]
    sections: tuple[str, ...]

    def is_supported(self, tables: dict[str, pd.DataFrame]) -> bool:
        """Return whether the rows in ``tables`` support the sentence."""
        return bool(self.holds(*_tables_of(self.sections, tables)))

    def answer(self, tables: dict[str, pd.DataFrame]) -> str:
        """Return "yes" or "no" for a reader's rows, "not measured" if some of them are missing."""
        if not all(map(len, _tables_of(self.sections, tables))):
            return "not measured"
        try:
            return "yes" if self.is_supported(tables) else "no"
        except LACKING:
            return "not measured"


def _tables_of(sections: tuple[str, ...], tables: dict[str, pd.DataFrame]) -> list[pd.DataFrame]:
    return [tables[name] for name in sections]


def pick(rows: pd.DataFrame, **where) -> pd.DataFrame:
    """Return the rows whose columns equal ``where``; a list, set or tuple means any of its values.

    A column that is called like a keyword of Python has an underscore after its name (``pass_``).
    Raises Missing if no row is left.
    """
    return rows.iloc[_places(rows, where)]


def _places(rows: pd.DataFrame, where: dict) -> np.ndarray:
    """Return the positions of the rows that ``pick`` gives; by numpy, as pandas is slow on few."""
    places = np.arange(len(rows))
    for name, value in where.items():
        column = rows[_column(name)]
        cells = column.array.take(places).to_numpy(dtype=object, na_value=None)
        if isinstance(value, list | tuple | set | frozenset):
            places = places[[cell in value for cell in cells]]
        else:
            places = places[cells == value]
        if not len(places):
            there = ", ".join(sorted(map(str, column.dropna().unique()))[:20])
            raise Missing(f"no row with {where}: none from {name} = {value!r} on, of {there}")
    return places


def one(rows: pd.DataFrame, **where):
    """Return the only row whose columns equal ``where`` (see ``pick``), as a named tuple.

    Raises Missing if there is no such row, or if there are several.
    """
    places = _places(rows, where)
    if len(places) != 1:
        picked = rows.iloc[places]
        differ = [column for column in picked if picked[column].nunique(dropna=False) > 1]
        raise Missing(f"{len(picked)} rows with {where}; they differ in {', '.join(differ)}")
    cells = rows.iloc[places[0]]
    values = (cell.item() if isinstance(cell, np.generic) else cell for cell in cells)
    row = _row_type(tuple(rows))(*values)
    _asked.append((where, row))
    return row


_asked: list = []  # what `one` returned since the last claim: a claim that fails prints it


def level(first, second) -> bool:
    """Return whether two times tie: their medians differ by at most 2 %, or their ranges from p20
    to p80 overlap.

    Each is a number, or a row with ms, ms_p20 and ms_p80; a blank quantile counts as the median.
    """
    low_1, median_1, high_1 = _range(first)
    low_2, median_2, high_2 = _range(second)
    if max(median_1, median_2) <= LEVEL * min(median_1, median_2):
        return True
    return low_1 <= high_2 and low_2 <= high_1


def faster(first, second) -> bool:
    """Return whether ``first`` takes less time than ``second`` and the two do not tie."""
    return _range(first)[1] < _range(second)[1] and not level(first, second)


def _range(row) -> tuple[float, float, float]:
    """Return p20, median and p80 of a row, or a number three times."""
    if not hasattr(row, "ms"):
        return row, row, row
    low = row.ms if pd.isna(row.ms_p20) else row.ms_p20
    high = row.ms if pd.isna(row.ms_p80) else row.ms_p80
    return low, row.ms, high


class Page:
    """The rows of a section and of others, and the claims that a page makes about them.

    section: the page's own section.
    derive: ``derive(rows, rows_of)`` returns the section's rows with derived columns;
        ``rows_of(name)`` are the rows of another section on the same device.
    roots: the folders to read; by default those of ``data.data_roots``.
    also: other sections by name, each with its derive or None.
    """

    strict = True  # a test that wants to see every claim sets it False

    def __init__(
        self,
        section: str,
        derive: Derive | None = None,
        *,
        roots: list[Path] | None = None,
        **also: Derive | None,
    ):
        self.section, self.claims = section, []
        self._roots = tuple(data.data_roots() if roots is None else roots)
        self._label = section.replace("_", "-")
        self._derive = {section: derive, **also}
        self.runs = data.load_runs([*self._roots])
        self.tables = self._tables(None)
        self.rows = self.tables[section]

    def rows_of(self, section: str) -> pd.DataFrame:
        """Return the published device's rows of a section that the page named."""
        return self.tables[section]

    def local(self) -> dict[str, dict[str, pd.DataFrame]]:
        """Return the tables of each other device that has rows of the page's section, by name."""
        devices = set(_every(self.section, self._roots).query("local")["device"])
        order = sorted(devices, key=lambda name: (name == "cpu", name))
        return {device: self._tables(device) for device in order}

    def claim(self, words: str, *sections: str) -> Callable:
        """Check, as a decorator of a named function, that the published rows support ``words``.

            @page.claim("A rank's peak is at most 54 % of data parallelism's", "fsdp_memory")
            def halves_the_peak(memory):
                return peak(memory, "fsdp") < 0.54 * peak(memory, "ddp")

        The function gets the tables of ``sections`` in their order, or the page's own table if none
        is named. Raises ClaimError unless it returns a true value.
        """

        def check(holds: Callable[..., bool]) -> Callable[..., bool]:
            _asked.clear()
            claim = Claim(words, holds, sections or (self.section,))
            self.claims.append(claim)
            if self.strict and not claim.is_supported(self.tables):
                asked = [f"{where}: ms {getattr(row, 'ms', None)}" for where, row in _asked[:8]]
                rows = "; ".join(asked)
                raise ClaimError(f"{self.section}: the rows do not support: {words}. Asked: {rows}")
            return holds

        return check

    def pending(self, words: str, lacking: Callable[..., pd.DataFrame], *sections: str) -> Markdown:
        """Return the sentence that something is not measured yet.

        ``lacking`` gets the tables of ``sections`` and returns the rows in question. Raises
        ClaimError once there are any, since a text has to be written about them then.
        """
        tables = _tables_of(sections or (self.section,), self.tables)
        try:
            number = len(lacking(*tables))
        except Missing:
            number = 0
        if number:
            raise ClaimError(f"{self.section}: {number} rows are there now of: {words}")
        return Markdown(f"*Not measured yet: {words}.*")

    def table(
        self, frame: pd.DataFrame, caption: str, name: str, left: int = 1, keys: int = 1, fold=True
    ) -> Markdown:
        """Return a numbered table, in a fold under its caption if it is longer than OPEN_LINES;
        with ``fold=False`` as it is: in a fold already, or to be seen at once."""
        table = Table(frame, caption, name, left=left, keys=keys)
        return Markdown(folded(table, longest=OPEN_LINES)) if fold else table

    def source(self, command: str) -> Markdown:
        """Return a fold that says where the page's rows come from: files, machine, versions, and
        the command that measures them."""
        published = []
        for name in self._derive:
            published.append(_every(name, self._roots).query("not local"))
        line = provenance.source(pd.concat(published), self.runs, command)
        return Markdown(f":::::{{dropdown}} Where these numbers come from\n{line.text}\n:::::\n")

    def your_machine(self, command: str) -> Markdown:
        """Return what of this page holds on each other device: the claims that its rows answer,
        links to the rows, and the command for a GPU, which a CPU might refuse."""
        text, local = [], self.local()
        for device, tables in local.items():
            text.append(self._answers(device, tables))
            if len(tables[self.section]):
                text.append(_links(device, tables[self.section]))
        if not text:
            text.append(
                "Nothing is measured on another machine yet. To see which of this page's "
                "claims hold on yours:"
            )
        if [*local] != ["cpu"]:
            text.append(f"```\n{command}\nmake html\n```")
        return Markdown("\n\n".join(text))

    def _answers(self, device: str, tables: dict[str, pd.DataFrame]) -> str:
        """Return the page's claims that rows of a device answer, as a table, and how many others
        there are."""
        name = style.device_name(device)
        answered = []
        for claim in self.claims:
            answer = claim.answer(tables)
            if answer != "not measured":
                answered.append((claim.words, answer))
        if not answered and device == "cpu":
            return "This page's claims are about GPUs; a CPU's rows answer none of them."
        if not answered:
            return f"Of what this page says nothing is measured on {name}."
        lines = pd.DataFrame(answered, columns=["claim about the published GPU", name])
        label = f"tab-{self._label}-holds-{device}"
        text = folded(Table(lines, f"What of this page holds on {name}", label, 2), OPEN_LINES)
        left = len(self.claims) - len(answered)
        if left:
            text += f"\nClaims whose rows are not measured on {name}: {left}.\n"
        return text

    def _tables(self, device: str | None) -> dict[str, pd.DataFrame]:
        """Return the page's tables of a device (None: the published one); they are copies, to which
        a page may add columns."""
        tables = {}
        for name, derive in self._derive.items():
            tables[name] = _derived(name, derive, self._roots, device).copy(deep=False)
        return tables


# Pages of one process share rows, and what several of them derive alike.
@cache
def _every(section: str, roots: tuple[Path, ...]) -> pd.DataFrame:
    """Return the rows of a section, of all devices."""
    return data.load(section, [*roots])


@cache
def _raw(section: str, roots: tuple[Path, ...], device: str | None) -> pd.DataFrame:
    """Return the rows of a section on a device as they are stored; None: the published device."""
    rows = _every(section, roots)
    if device is None:
        rows = rows[~rows["local"]]
    else:
        rows = rows[rows["local"] & (rows["device"] == device)]
    # What was measured here, in the last root, replaces what came with the project.
    key = list(SECTIONS[section].key)
    return rows.drop_duplicates(key, keep="last").reset_index(drop=True)


@cache
def _derived(
    section: str, derive: Derive | None, roots: tuple[Path, ...], device: str | None
) -> pd.DataFrame:
    """Return the rows of a section on a device with what ``derive`` adds; as they are stored, if a
    reader's rows do not suffice for that."""
    rows_of = partial(_raw, roots=roots, device=device)
    rows = rows_of(section)
    if derive is None or not len(rows):
        return rows
    try:
        return derive(rows, rows_of)
    except LACKING:
        if device is None:
            raise
        return rows


def _links(device: str, rows: pd.DataFrame) -> str:
    """Return links to the files that hold a device's rows."""
    links = map(provenance.link, sorted(set(rows["file"])))
    return f"Rows of {style.device_name(device)}: {', '.join(links)}."


def _column(name: str) -> str:
    """Return the column that a name means: pass for pass_."""
    plain = name.removesuffix("_")
    return plain if keyword.iskeyword(plain) else name


@cache
def _row_type(columns: tuple[str, ...]):
    """Return the named tuple of rows with these columns: pass is its field pass_."""
    names = [f"{name}_" if keyword.iskeyword(name) else name for name in columns]
    return namedtuple("Row", names, rename=True)
