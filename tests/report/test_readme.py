"""README.md's picture: the committed one is of the committed rows."""

import shutil

import committed
import pytest

from a2lib.paths import ROOT
from a2lib.report import readme
from a2lib.report.data import ReportError

ROWS = "measured/flash/nvidia-h200.csv"
ONE_HEAD = {"batch": "1", "heads": "1", "head_dim": "64"}
SHAPE = {**ONE_HEAD, "dtype": "bf16", "causal": "true", "pass": "end_to_end"}


def measured(name):
    times = {}
    for row in committed.measured("flash"):
        if row["implementation"] == name and SHAPE.items() <= row.items():
            times[int(row["seq_len"])] = float(row["ms_graph"])
    return times


@pytest.fixture
def data_folder(tmp_path):
    """A copy of the rows."""
    return shutil.copytree(ROOT / "data", tmp_path / "data")


def change(data_folder, old, new):
    text = (data_folder / ROWS).read_text()
    assert old in text
    (data_folder / ROWS).write_text(text.replace(old, new))


def test_the_committed_picture_shows_the_committed_rows():
    shown = readme.plotted(readme.PICTURE)
    assert list(shown) == list(readme.LINES)
    for name, points in shown.items():
        times = measured(name)
        assert len(times) >= 10 and points == [[n, times[n]] for n in sorted(times)], (
            f"{name}: run make html, which draws the picture, and commit it"
        )


def test_it_is_drawn_again_where_a_row_changed_and_there_alone(data_folder, tmp_path):
    picture = tmp_path / "picture.png"
    shutil.copy(readme.PICTURE, picture)
    committed = picture.read_bytes()
    assert readme.write(picture, data_folder).read_bytes() == committed
    longest = max(measured("a2lib"))
    change(data_folder, f",{measured('a2lib')[longest]:g},", ",1.5,")
    readme.write(picture, data_folder)
    assert picture.read_bytes() != committed
    assert readme.plotted(picture)["a2lib"][-1] == [longest, 1.5]


def test_a_line_without_times_is_refused(data_folder, tmp_path):
    change(data_folder, "\nflex,", "\nxelf,")
    with pytest.raises(ReportError, match="no GPU time of flex"):
        readme.write(tmp_path / "picture.png", data_folder)
    assert not (tmp_path / "picture.png").exists()
