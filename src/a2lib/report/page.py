"""What a page of the book is written with: rows, numbers in the text, claims, tables.

    page = Page("sorting", columns)     # its section, and what is derived from its columns
    t = page.rows                       # of the published device: a pandas table
    best = one(t, operation="quick", size=1024)
    page.claim("Quicksort has the lowest peak", lambda t: ...)

A person writes the text about the published rows, each number as ``{eval}`gb(best.peak_bytes)` ``.
What it says that a measurement could refute is a claim: where the published rows do not bear it
the build fails and says so. The same claims are answered on the reader's rows: yes, no, or not
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
from a2lib.paths import ROOT
from a2lib.report import data, provenance, style
from a2lib.report.tables import Markdown, Table, folded

LEVEL = 1.02
OPEN_LINES = 8  # a table of more lines is folded away
ROWS_SHOWN = 500  # more of them make a page heavy: a link to their file
# What derived columns and claims raise where some of a reader's rows are not there.
LACKING = LookupError, AttributeError, NameError, ValueError, TypeError, ArithmeticError

Derive = Callable[[pd.DataFrame, Callable[[str], pd.DataFrame]], pd.DataFrame]


class ClaimError(AssertionError):
    """A sentence of the book that its rows do not bear."""


class Missing(LookupError):
    """No row, or several, where a text or a claim speaks of one."""


@dataclass(frozen=True)
class Claim:
    """What a text says of the rows of ``sections``, as a function of their tables in that order."""

    words: str
    holds: Callable[..., bool]
    sections: tuple[str, ...]

    def bears(self, tables: dict[str, pd.DataFrame]) -> bool:
        return bool(self.holds(*(tables[name] for name in self.sections)))

    def answer(self, tables: dict[str, pd.DataFrame]) -> str:
        """On a reader's rows: "yes", "no", or "not measured" where some of them are not there."""
        if not all(len(tables[name]) for name in self.sections):
            return "not measured"
        try:
            return "yes" if self.bears(tables) else "no"
        except LACKING:
            return "not measured"


def pick(rows: pd.DataFrame, **where) -> pd.DataFrame:
    """The rows whose columns equal ``where``; a list, set or tuple means any of its values.

    A column that is called like a word of Python has an underscore after its name (``pass_``).
    Raises Missing where none is left.
    """
    return rows.iloc[_places(rows, where)]


def _places(rows: pd.DataFrame, where: dict) -> np.ndarray:
    """Where the rows stand that ``pick`` gives; by numpy, as pandas is slow on so few."""
    found = np.arange(len(rows))
    for name, value in where.items():
        column = rows[_column(name)]
        cells = column.array.take(found).to_numpy(dtype=object, na_value=None)
        several = isinstance(value, (list, tuple, set, frozenset))
        found = found[[cell in value for cell in cells] if several else cells == value]
        if not len(found):
            there = ", ".join(sorted(map(str, column.dropna().unique()))[:20])
            raise Missing(f"no row with {where}: none from {name} = {value!r} on, of {there}")
    return found


def one(rows: pd.DataFrame, **where):
    """The one row whose columns equal ``where`` (as for ``pick``), as a named tuple.

    Raises Missing where there is none or several.
    """
    places = _places(rows, where)
    if len(places) != 1:
        found = rows.iloc[places]
        differ = [c for c in found if found[c].nunique(dropna=False) > 1]
        raise Missing(f"{len(found)} rows with {where}; they differ in {', '.join(differ)}")
    cells = rows.iloc[places[0]]
    row = _kind(tuple(rows))(*(v.item() if isinstance(v, np.generic) else v for v in cells))
    _asked.append((where, row))
    return row


_asked: list = []  # what `one` gave since the claim before, for the message of one that fails


def level(one, other) -> bool:
    """Whether two times tie: medians within 2 %, or ranges from p20 to p80 that overlap.

    Rows with ms, ms_p20 and ms_p80 (a blank quantile counts as the median), or numbers.
    """
    (low, middle, high), (other_low, other_middle, other_high) = _range(one), _range(other)
    if max(middle, other_middle) <= LEVEL * min(middle, other_middle):
        return True
    return low <= other_high and other_low <= high


def faster(one, other) -> bool:
    """Whether ``one`` takes less time than ``other`` and the two are not level."""
    return _range(one)[1] < _range(other)[1] and not level(one, other)


def _range(row) -> tuple[float, float, float]:
    if not hasattr(row, "ms"):
        return row, row, row
    low, high = (row.ms if pd.isna(q) else q for q in (row.ms_p20, row.ms_p80))
    return low, row.ms, high


class Page:
    """Rows of a section and of others, and what a page says of them.

    ``derive(rows, rows_of)`` gives the rows with the columns that the page speaks of, where
    ``rows_of(name)`` are the rows of another section on the same device. ``also`` are other
    sections, each with its derive or None.
    """

    strict = True  # a test that wants to hear of every claim sets it False

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
        """The published device's rows of a section that this page named."""
        return self.tables[section]

    def local(self) -> dict[str, dict[str, pd.DataFrame]]:
        """By the name of each other device that has rows of the page's section, its tables."""
        devices = set(_every(self.section, self._roots).query("local")["device"])
        order = sorted(devices, key=lambda name: (name == "cpu", name))
        return {device: self._tables(device) for device in order}

    def claim(self, words: str, *sections):
        """Check, as a decorator of a named function, that the published rows bear ``words``.

            @page.claim("A rank's peak is at most 54 % of data parallelism's", "fsdp_memory")
            def halves_the_peak(memory):
                return peak(memory, "fsdp") < 0.54 * peak(memory, "ddp")

        The function gets the tables of ``sections`` (the page's own where none is named) in their
        order. Raises ClaimError unless it returns a true value.
        """
        if sections and callable(sections[0]):  # claim(words, function, *sections)
            holds, *names = sections
            return self._check(words, holds, names)
        return lambda holds: self._check(words, holds, sections)

    def _check(self, words: str, holds: Callable[..., bool], sections):
        _asked.clear()
        claim = Claim(words, holds, tuple(sections) or (self.section,))
        self.claims.append(claim)
        if self.strict and not claim.bears(self.tables):
            rows = "; ".join(f"{w}: ms {getattr(r, 'ms', None)}" for w, r in _asked[:8])
            raise ClaimError(f"{self.section}: the rows do not bear: {words}. Asked: {rows}")
        return holds

    def pending(self, words: str, lacking: Callable[..., pd.DataFrame], *sections: str) -> Markdown:
        """What is not measured yet, said on the page.

        Raises ClaimError once ``lacking`` finds rows: a text has to be written about them then.
        """
        try:
            found = len(lacking(*(self.tables[name] for name in sections or (self.section,))))
        except Missing:
            found = 0
        if found:
            raise ClaimError(f"{self.section}: {found} rows are there now of: {words}")
        return Markdown(f"*Not measured yet: {words}.*")

    def table(
        self, frame: pd.DataFrame, caption: str, name: str, left: int = 1, keys: int = 1, fold=True
    ) -> Markdown:
        """A numbered table; one of more than eight lines is folded away under its caption, unless
        not to ``fold`` (because it stands in a fold already)."""
        table = Table(frame, caption, name, left=left, keys=keys)
        return Markdown(folded(table, longest=OPEN_LINES)) if fold else table

    def source(self, command: str) -> Markdown:
        """Where the page's rows come from, in a line: files, machine, versions and the command;
        and, folded, the runs and what the lab record holds."""
        published = {name: _every(name, self._roots).query("not local") for name in self._derive}
        rows = pd.concat(published.values())
        line = provenance.source(rows, self.runs, command)
        label = f"tab-{self._label}-runs"
        runs = provenance.runs_table(rows, self.runs, "The runs behind this page", label)
        notebook = SECTIONS[self.section].notebook
        # A notebook's run may have measured another of its sections alone.
        own = [published[name] for name in published if SECTIONS[name].notebook == notebook]
        record = provenance.lab_record(pd.concat(own), ROOT / "notebooks" / f"{notebook}.ipynb")
        fold = f"::::{{dropdown}} The runs behind this page\n{runs.text}\n{record.text}\n::::"
        return Markdown(f"{line.text}\n\n{fold}\n")

    def your_machine(self, command: str) -> Markdown:
        """What of this page holds on each other device: its claims answered, and of its rows the
        columns that differ, as they are stored."""
        text = []
        for device, tables in self.local().items():
            name = style.device_name(device)
            answers = [(c.words, c.answer(tables)) for c in self.claims]
            lines = pd.DataFrame(answers, columns=["said of the published GPU", name])
            known = sum(answer != "not measured" for _, answer in answers)
            if known:
                label = f"tab-{self._label}-holds-{device}"
                table = Table(lines, f"What of this page holds on {name}", label, 2)
                text.append(folded(table, longest=OPEN_LINES))
            else:
                text.append(f"Of what this page says nothing is measured on {name}.")
            rows = tables[self.section]
            if len(rows) > ROWS_SHOWN:
                links = ", ".join(provenance.link(file) for file in sorted(set(rows["file"])))
                text.append(f"Rows of {name}: {links}.")
            elif len(rows):
                frame = _as_stored(rows, self.section)
                label = f"tab-{self._label}-rows-{device}"
                text.append(folded(Table(frame, f"Rows of {name}", label), longest=0))
        if not text:
            text.append(
                "Nothing is measured on another machine yet. To see which of this page's "
                "claims hold on yours:"
            )
        return Markdown("\n\n".join([*text, f"```\n{command}\nmake html\n```"]))

    def _tables(self, device: str | None) -> dict[str, pd.DataFrame]:
        """Copies, to which a page may add columns of its own."""
        return {
            name: _derived(name, derive, self._roots, device).copy(deep=False)
            for name, derive in self._derive.items()
        }


# Pages of one process share rows, and what several of them derive alike.
@cache
def _every(section: str, roots: tuple[Path, ...]) -> pd.DataFrame:
    return data.load(section, [*roots])


@cache
def _raw(section: str, roots: tuple[Path, ...], device: str | None) -> pd.DataFrame:
    every = _every(section, roots)
    local = every["local"] & (every["device"] == device)
    mine = every[~every["local"] if device is None else local]
    # What was measured here, in the last root, replaces what came with the project.
    key = list(SECTIONS[section].key)
    return mine.drop_duplicates(key, keep="last").reset_index(drop=True)


@cache
def _derived(
    section: str, derive: Derive | None, roots: tuple[Path, ...], device: str | None
) -> pd.DataFrame:
    rows_of = partial(_raw, roots=roots, device=device)
    rows = rows_of(section)
    try:
        return derive(rows, rows_of) if derive and len(rows) else rows
    except LACKING:
        if device is None:
            raise
        return rows  # as they are stored


def _as_stored(rows: pd.DataFrame, section: str) -> pd.DataFrame:
    table = SECTIONS[section]
    keys = [c for c in table.key if rows[c].nunique(dropna=False) > 1] or list(table.key[:1])
    values = [c for c in ("status", "ms", *table.values) if c != "note" and rows[c].notna().any()]
    frame = rows[[*keys, *values]].copy()
    numbers = frame.select_dtypes("number").astype(object)
    texts = numbers.map(lambda v: f"{v:.4g}" if v % 1 else f"{int(v):,}", na_action="ignore")
    return frame.assign(**texts)


def _column(name: str) -> str:
    plain = name.removesuffix("_")
    return plain if keyword.iskeyword(plain) else name


@cache
def _kind(columns: tuple[str, ...]):
    names = [f"{name}_" if keyword.iskeyword(name) else name for name in columns]
    return namedtuple("Row", names, rename=True)
