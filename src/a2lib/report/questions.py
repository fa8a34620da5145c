"""Every question of the assignment, both editions: where the book answers it and how far.

``data/questions.csv`` has a line for each part: its problem, part and editions, the question in
short, the page and the anchor of its answer, and of what is measured the section, a pandas query
that finds the part's ``rows``, queries of what is ``lacking`` with "; " between, each of which
must find rows before the part is whole, and what is ``missing`` in words.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from a2lib.paths import ROOT
from a2lib.report import data

FILE = ROOT / "data" / "questions.csv"


@dataclass(frozen=True)
class Question:
    """A line of the file."""

    group: str
    id: str
    part: str
    editions: str
    question: str
    page: str
    anchor: str
    section: str
    rows: str
    lacking: str
    missing: str

    @property
    def label(self) -> str:
        return f"{self.id} {self.part}".strip()

    def has(self, query: str) -> int:
        """How many of the published device's rows of its section a query finds."""
        return _found(self.section, query, *data.data_roots())


@cache  # a page asks for each part several times
def _published(section: str, *roots: Path) -> pd.DataFrame:
    every = data.load(section, [*roots])
    return every[~every["local"]]


@cache
def _found(section: str, query: str, *roots: Path) -> int:
    return len(_published(section, *roots).query(query))


def load() -> dict[str, Question]:
    """The questions by label, in the order of the handouts."""
    with FILE.open(encoding="utf-8", newline="") as file:
        found = [Question(**line) for line in csv.DictReader(file)]
    return {question.label: question for question in found}


def state(label: str) -> str:
    """How far a part is answered, counted from its own rows: "derived", "whole", "partly" with
    what is missing, or "not measured yet". Raises KeyError for another label.
    """
    question = load()[label]
    if not question.page:
        return "not measured yet"
    if not question.section:
        return "derived"
    if not question.has(question.rows):
        return "not measured yet"
    lacking = [query for query in question.lacking.split("; ") if query]
    if question.missing and not (lacking and all(map(question.has, lacking))):
        return f"partly; not yet: {question.missing}"
    return "whole"


def counts() -> dict[str, int]:
    """How many parts there are, how many are answered ``whole`` (derived ones among them), how many
    ``partly``, and how many are ``open``."""
    states = [state(label) for label in load()]
    whole = sum(s in ("whole", "derived") for s in states)
    partly = sum(s.startswith("partly") for s in states)
    open_ = len(states) - whole - partly
    return {"all": len(states), "whole": whole, "partly": partly, "open": open_}
