"""What a figure is in a browser, checked without one: colours, letters, weight, drawings."""

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from svg_sizes import LEAST_SIZE, contrast, smallest_text

from a2lib.report import data, panels, style, svg
from a2lib.report.page import pick
from a2lib.report.pages import communication, flash, flash_shapes
from a2lib.report.pages import flash_drawings as attention
from a2lib.report.pages import parallelism_drawings as drawings
from a2lib.report.pages.flash import LOOKS
from a2lib.report.plots import HEAT

LIGHT = {name: light for name, light, _ in svg.PAIRS.values()}
DARK = {name: dark for name, _, dark in svg.PAIRS.values()}
LINES = ["dim", "vermilion", "slate", "ochre", "blue", "green", "sky", "rose", "brown", "grey"]
FILLS = ["ahead3", "ahead2", "ahead1", "level", "behind1", "behind2", "behind3"]


def drawn():
    """A figure or drawing of each kind, of the committed rows; those on parallelism, of none."""
    rows = data.load("flash")
    rows = flash.columns(rows[~rows["local"]].reset_index(drop=True), None)
    one = pick(rows, kind="one head", dtype="bf16", head_dim=64)
    return {
        "bars": flash.bars(pick(rows, kind="board")),
        "maps": flash_shapes.maps(rows, "bf16"),
        "lines": flash.regimes(pick(one, pass_="backward")),
        "tiles": attention.tiles(),
        "fsdp": drawings.fully_sharded(), "tensor": drawings.tensor_parallel(),
        "mesh": drawings.mesh(), "exchange": drawings.experts_and_contexts(),
        "rings": drawings.rings(), "pipelines": drawings.pipelines(),
        "sequence": drawings.sequence_parallel(), "map": drawings.mesh_map(),
        "sensitivity": communication.sensitivity(), "devices": communication.devices(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def texts():
    """The SVG text of every figure."""
    return {name: chart._repr_svg_() for name, chart in drawn().items()}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_letters_stand_out_on_the_page(theme):
    # WCAG 2.1, 1.4.11 for what is drawn and 1.4.3 for what is read.
    assert {n: c for n in LINES if (c := contrast(theme[n], theme["paper"])) < 3} == {}
    for letters in ("ink", "dim"):
        assert contrast(theme[letters], theme["paper"]) >= 4.5
    assert {n: c for n in FILLS if (c := contrast(theme["ink"], theme[n])) < 4.5} == {}


def test_every_colour_of_an_implementation_has_a_twin_in_the_dark():
    used = {*style.COLOURS, *(LOOKS.look(name).colour for name in [*LOOKS, "unheard of"])}
    assert used | {style.INK, style.PAPER, style.DIM, style.GRID, *HEAT} <= set(svg.PAIRS)


def test_a_figure_has_both_palettes_and_no_colour_of_its_own(texts):
    for name, text in texts.items():
        ElementTree.fromstring(text)
        assert text.count("prefers-color-scheme:dark") == 1, name
        rules = re.sub(r"--\w+:#[0-9a-f]{6}", "", text)
        assert re.findall(r"#[0-9a-f]{6}\b", rules) == [], name
        asked = set(re.findall(r"var\(--(\w+)\)", text))
        palettes = re.findall(r"--(\w+):#[0-9a-f]{6}", text)
        assert Counter(palettes) == dict.fromkeys(asked | {"ink"}, 2), name
        background = re.search(r"<style>.*?</style>\s*<(?:path|rect)[^>]*(?:class=\"(\w+)\")", text)
        assert f".{background[1]}{{fill:var(--paper)}}" in text, name


def test_text_is_text_and_large_enough_on_a_phone(texts):
    for name, text in texts.items():
        assert smallest_text(text) >= LEAST_SIZE and len(text) < 70_000, name
        assert "DejaVu" not in text and "<metadata" not in text, name
    assert "efficient</text>" in texts["lines"] and "memory-efficient" not in texts["lines"]


def test_names_do_not_touch_and_keep_the_order_of_their_lines():
    wanted = [5.0, 5.1, 5.2, 50.0, 4.9, 99.0]
    found = panels.places(wanted, line=10, low=0, high=100)
    by_want = [height for _, height in sorted(zip(wanted, found, strict=True))]
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(by_want))
    assert by_want[0] >= 5 and by_want[-1] <= 95
    assert found[3] == 50 and found[5] == 95
