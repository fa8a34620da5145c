"""Rows that are dictionaries, asked as a table is."""

from operator import itemgetter


def values(rows, *columns):
    """Return what each row has in one column, or a tuple of what it has in several."""
    return list(map(itemgetter(*columns), rows))


def by(rows, *columns):
    """Return the rows by what they have in these columns, no two of them alike."""
    rows = list(rows)
    found = dict(zip(values(rows, *columns), rows, strict=True))
    assert len(found) == len(rows)
    return found


def where(rows, **wanted):
    """Return the rows that have these values in these columns."""
    return [row for row in rows if wanted.items() <= row.items()]
