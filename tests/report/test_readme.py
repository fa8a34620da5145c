"""README.md's picture: the committed one is of the committed rows."""

import committed

from a2lib.report import readme

ONE_HEAD = {"batch": "1", "heads": "1", "head_dim": "64"}
SHAPE = {**ONE_HEAD, "dtype": "bf16", "causal": "true", "pass": "end_to_end"}


def measured(name):
    times = {}
    for row in committed.measured("flash"):
        if row["implementation"] == name and SHAPE.items() <= row.items():
            times[int(row["seq_len"])] = float(row["ms_graph"])
    return times


def test_the_committed_picture_shows_the_committed_rows():
    shown = readme.plotted(readme.PICTURE)
    assert list(shown) == list(readme.LINES)
    for name, points in shown.items():
        times = measured(name)
        assert len(times) >= 10 and points == [[n, times[n]] for n in sorted(times)], (
            f"{name}: run make html, which draws the picture, and commit it"
        )
