"""An all-gather and the turn of the unit that it is for."""

from a2lib.lab import bulk
from a2lib.lab.gathers import Moment, gather_rows

# Two units: b is gathered ahead in forward and kept; a has to be gathered again in backward.
MOMENTS_OF_A_STEP = [
    ("begins", "root", "forward", 0), ("gather begins", "a", "forward", 1),
    ("gather ends", "a", "forward", 4), ("gather begins", "b", "forward", 5),
    ("gather ends", "b", "forward", 7),
    ("turn", "a", "forward", 2), ("computes", "a", "forward", 4),
    ("turn", "b", "forward", 10), ("computes", "b", "forward", 10), ("ends", "root", "forward", 15),
    ("gather begins", "a", "backward", 16), ("gather ends", "a", "backward", 22),
    ("turn", "b", "backward", 15), ("computes", "b", "backward", 15),
    ("reduce begins", "b", "backward", 20), ("reduce ends", "b", "backward", 24),
    ("turn", "a", "backward", 20), ("computes", "a", "backward", 22),
    ("ends", "root", "backward", 30),
]  # fmt: skip


def test_a_gather_is_held_against_the_turn_of_its_unit():
    rows = gather_rows([Moment(*moment) for moment in MOMENTS_OF_A_STEP])
    columns = ("pass", "unit", "gather_start_ms", "gather_end_ms", "slack_ms", "waited_ms")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("forward", "a", 1, 4, -2, 2),
        ("forward", "b", 5, 7, 3, 0),
        ("backward", "a", 16, 22, -2, 2),
    ]
    assert [row["compute_end_ms"] for row in rows] == [10, 15, 30]
    assert set(rows[0]) == set(bulk.TABLES["gathers"])
