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
    """One part of a problem: a line of the file."""

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

    def count(self, query: str) -> int:
        """Return how many of the published device's rows of its section a query selects."""
        return _count_rows(self.section, query, *data.data_roots())


@cache  # a page asks for each part several times
def _published(section: str, *roots: Path) -> pd.DataFrame:
    rows = data.load(section, [*roots])
    return rows[~rows["local"]]


@cache
def _count_rows(section: str, query: str, *roots: Path) -> int:
    return len(_published(section, *roots).query(query))


def load() -> dict[str, Question]:
    """Return the questions by label, in the order of the handouts."""
    with FILE.open(encoding="utf-8", newline="") as file:
        questions = [Question(**line) for line in csv.DictReader(file)]
    return {question.label: question for question in questions}


def state(label: str) -> str:
    """Return how far a part is answered, counted from its own rows: "answered", "derived on paper",
    "partly answered" with what is missing, or "not measured yet". Raises KeyError for a label that
    is none of a part.
    """
    question = load()[label]
    if question.page and not question.section:
        return "derived on paper"
    if not question.page or not question.count(question.rows):
        return "not measured yet"
    if not question.missing:
        return "answered"
    queries = [query for query in question.lacking.split("; ") if query]
    if queries and all(question.count(query) for query in queries):
        return "answered"
    return f"partly answered; not measured yet: {question.missing}"


def counts() -> dict[str, int]:
    """Return how many parts there are ("all"), and how many are "answered", "derived" on paper,
    "partly" answered, and "open"."""
    states = [state(label) for label in load()]
    numbers = {"all": len(states), "answered": states.count("answered")}
    numbers["derived"] = states.count("derived on paper")
    numbers["partly"] = sum(s.startswith("partly") for s in states)
    numbers["open"] = states.count("not measured yet")
    return numbers
