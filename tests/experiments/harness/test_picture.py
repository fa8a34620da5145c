"""The figure of a notebook's run: names beside the lines, not upon them."""

import warnings

import pytest

from a2lib.experiments.harness.picture import legend_beside, subplots


@pytest.mark.parametrize("lines", [1, 16, 32])
def test_the_names_stand_beside_the_lines_however_many_there_are(lines):
    figure, ax = subplots(figsize=(8, 4))
    for number in range(lines):
        ax.plot([1, 2], [1, number], label=f"causal fp32 128 backward {number}")
    legend_beside(figure, ax)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that no room was left for the axes
        figure.draw_without_rendering()
    (names,) = figure.legends
    assert len(names.get_texts()) == lines
    box, panel = names.get_window_extent(), ax.get_window_extent()
    assert box.x0 >= panel.x1 and panel.width > 0.3 * figure.bbox.width
    assert box.y0 >= 0 and box.y1 <= figure.bbox.height
