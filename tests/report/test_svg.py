"""What a figure is in a browser, checked without one: colours, letters, weight."""

from xml.etree import ElementTree

import pytest
from svg_sizes import LEAST_SIZE, contrast, on_a_dark_page, smallest_text

from a2lib.report import data, style
from a2lib.report.page import pick
from a2lib.report.pages import flash, flash_shapes, parallelism
from a2lib.report.pages.flash import LOOKS
from a2lib.report.plots import HEAT

LINES = {*style.COLOURS, style.DIM, "#808080"}


@pytest.fixture(scope="module")
def texts():
    """Return the SVG text of a figure of each kind, of the committed rows or of none."""
    rows = data.load("flash")
    rows = flash.columns(rows[~rows["local"]].reset_index(drop=True), None)
    one = pick(rows, kind="one head", dtype="bf16", head_dim=64)
    return {
        "bars": flash.bars(pick(rows, kind="board"))._repr_svg_(),
        "maps": flash_shapes.maps(rows)._repr_svg_(),
        "lines": flash.regimes(pick(one, pass_="backward"))._repr_svg_(),
        "map": parallelism.mesh_map()._repr_svg_(),
    }


@pytest.mark.parametrize("shown", [str, on_a_dark_page], ids=["light", "dark"])
def test_lines_and_letters_stand_out_on_the_page(shown):
    # WCAG 2.1, 1.4.11 for what is drawn and 1.4.3 for what is read.
    paper, ink = shown(style.PAPER), shown(style.INK)
    for colour in LINES | {LOOKS.look(name).colour for name in [*LOOKS, "unheard of"]}:
        assert contrast(shown(colour), paper) >= 3, colour
    for letters in (style.INK, style.DIM):
        assert contrast(shown(letters), paper) >= 4.5
    for colour in HEAT:
        assert contrast(ink, shown(colour)) >= 4.5, colour


def test_text_is_text_and_large_enough_on_a_phone(texts):
    for name, text in texts.items():
        ElementTree.fromstring(text)
        assert smallest_text(text) >= LEAST_SIZE and len(text) < 110_000, name
    assert "efficient</text>" in texts["lines"] and "memory-efficient" not in texts["lines"]
