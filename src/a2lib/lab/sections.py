"""The registry: every table of ``data/measured``, as ``sections.toml`` beside this file has them.

A section is a folder of CSV files, one for each device. make's notebooks, the tables of
data/README.md and the tests over all notebooks and pages are held against this.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STATUSES = ("ok", "oom", "unsupported", "error")
# status: one of STATUSES. ms, ms_p20, ms_p80: median and quantiles of n samples in milliseconds,
# blank unless status is ok. run: the row of runs.csv that produced this one.
COMMON = ("status", "ms", "ms_p20", "ms_p80", "n", "run")
TIMES = ("ms", "ms_p20", "ms_p80")


@dataclass(frozen=True)
class Section:
    """One table: ``key`` identifies a row, ``values`` are section-specific results.

    ``columns`` is the header of its files, in order. Where it is not ``timed``, an ``ok`` row needs
    no ``ms``, but one of its values. ``notebook`` is the name of the notebook that measures it,
    blank where none does any more.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...] = ()
    timed: bool = True
    notebook: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.values + COMMON

    def columns_of(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return those of `fields` that the section has a column for, in its order."""
        return {name: fields[name] for name in self.columns if name in fields}


def section_of(name: str, key: str, values: str, **others: object) -> Section:
    """Return a section as the file has it, columns as words with spaces between them."""
    return Section(name, tuple(key.split()), tuple(values.split()), **others)


_FILE = tomllib.loads(Path(__file__).with_name("sections.toml").read_text(encoding="utf-8"))
SECTIONS = {name: section_of(name, **table) for name, table in _FILE["sections"].items()}
BULK: dict[str, str] = _FILE["bulk"]
INTEGERS = frozenset(_FILE["columns"]["whole"].split())
RESULTS = frozenset(_FILE["columns"]["number"].split())
FLAGS = frozenset(_FILE["columns"]["truth"].split())
