"""The picture of a step's memory: what is drawn is what the tables hold, in the house's colours."""

from pathlib import Path

import pytest
from profiles import make
from svg_sizes import texts

from a2lib.measure import snapshot
from a2lib.report.pages import timeline

HERE = Path(make.__file__).parent
MEMORY = HERE / "cuda_memory.pickle"


@pytest.fixture(scope="module")
def long_memory():
    """A timeline of 1500 points with one peak."""
    empty = dict.fromkeys(snapshot.CATEGORIES, 0)
    return [
        {"time_us": i * 100, "phase": "step 0/forward" if i < 800 else "step 0/backward",
         **empty, "parameters": 10**9, "saved for backward": 10**6 * min(i, 1500 - i),
         "temporaries": 10**9 if i == 777 else i % 7 * 1000}
        for i in range(1500)
    ]  # fmt: skip


def test_a_timeline_marks_its_peak_however_long(long_memory):
    assert "peak 0.002 MB" in texts(timeline.memory(MEMORY))
    # 1 GB, 1 GB for a moment, and 723 MB: the 777th of 1500 points.
    words = texts(timeline.memory(long_memory))
    assert {"peak 2.72 GB", "forward", "backward", "saved for backward"} <= set(words)
    assert "gradients" not in words
