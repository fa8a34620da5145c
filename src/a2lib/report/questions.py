"""Every question of the assignment, both editions: where the book answers it and how far.

``data/questions.csv`` has a line for each part: its problem, part and editions, the question in
short, the page and the anchor of its answer, and of what is measured the section, a pandas query
that finds the part's ``rows``, queries of what is ``lacking`` with "; " between, each of which
must find rows before the part is whole, and what is ``missing`` in words.
"""

from functools import cache

import pandas as pd

from a2lib.paths import ROOT
from a2lib.report import data

FILE = ROOT / "data" / "questions.csv"


@cache  # a page asks for each part several times
def load() -> dict[str, tuple]:
    """Return the lines of the file, as named tuples, by ``label``: id and part."""
    table = pd.read_csv(FILE, dtype=str, keep_default_na=False)
    table["label"] = (table["id"] + " " + table["part"]).str.strip()
    return {question.label: question for question in table.itertuples(index=False)}


def count(section: str, query: str) -> int:
    """Return how many of the published device's rows of a section a query selects."""
    return len(_published(section, *data.data_roots()).query(query))


@cache
def _published(section: str, *roots) -> pd.DataFrame:
    rows = data.load(section, [*roots])
    return rows[~rows["local"]]


def state(label: str) -> str:
    """Return how far a part is answered, counted from its own rows: "answered", "derived on paper",
    "partly answered" with what is missing, or "not measured yet". Raises KeyError for a label that
    is none of a part.
    """
    question = load()[label]
    if question.page and not question.section:
        return "derived on paper"
    if not question.page or not count(question.section, question.rows):
        return "not measured yet"
    if not question.missing:
        return "answered"
    if question.lacking:
        queries = question.lacking.split("; ")
        if all(count(question.section, query) for query in queries):
            return "answered"
    return f"partly answered; not measured yet: {question.missing}"


def counts() -> dict[str, int]:
    """Return how many parts there are ("all"), and how many are "answered", "derived" on paper,
    "partly" answered, and "open"."""
    states = pd.Series(map(state, load()))
    return {
        "all": len(states),
        "answered": int((states == "answered").sum()),
        "derived": int((states == "derived on paper").sum()),
        "partly": int(states.str.startswith("partly").sum()),
        "open": int((states == "not measured yet").sum()),
    }
