"""The list of references by author and year, the words by which the text cites them."""

from __future__ import annotations

from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle


def surname(person) -> str:
    return " ".join(str(part) for part in person.rich_prelast_names + person.rich_last_names)


def authors(names: list[str]) -> str:
    """Return the names as a citation has them."""
    if len(names) > 2:
        return f"{names[0]} et al."
    return " and ".join(names)


class AuthorYearLabels(BaseLabelStyle):
    """Label an entry as the text cites it: "Dao et al., 2022"."""

    def format_labels(self, sorted_entries):
        for entry in sorted_entries:
            names = [surname(person) for person in entry.persons["author"]]
            yield f"{authors(names)}, {entry.fields['year']}"


class AuthorYearStyle(Style):
    default_label_style = AuthorYearLabels


def setup(_app) -> dict:
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
