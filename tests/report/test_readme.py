"""README.md's picture: the committed one is of the committed rows."""

import committed
from tables import where

from a2lib.report import readme

ONE_HEAD = {"batch": "1", "heads": "1", "head_dim": "64"}
SHAPE = {**ONE_HEAD, "dtype": "bf16", "causal": "true", "pass": "end_to_end"}


def measured(name):
    """Return each length and its time, the shortest first."""
    points = []
    for row in where(committed.measured("flash"), implementation=name, **SHAPE):
        points.append([int(row["seq_len"]), float(row["ms_graph"])])
    return sorted(points)


def test_the_committed_picture_shows_the_committed_rows():
    shown = readme.plotted(readme.PICTURE)
    assert list(shown) == list(readme.LINES)
    for name, points in shown.items():
        assert len(points) >= 10
        assert points == measured(name), f"{name}: make html draws the picture; commit it"
