"""What a figure is in a browser, checked without one: colours, letters, weight, drawings."""

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pandas as pd
import pytest

from a2lib.report import data, metrics, panels, style, svg
from a2lib.report.chapters.flash import drawing, figures
from a2lib.report.chapters.flash.view import LOOKS, VIEW
from a2lib.report.figures import HEAT
from a2lib.report.metrics import pick

LIGHT = {name: light for name, light, _ in svg.PAIRS.values()}
DARK = {name: dark for name, _, dark in svg.PAIRS.values()}
LINES = ["dim", "vermilion", "slate", "ochre", "blue", "green", "sky", "rose", "brown", "grey"]
FILLS = ["ahead3", "ahead2", "ahead1", "level", "behind1", "behind2", "behind3"]


def protocol_rows(seconds=6):
    """Rows as `flash_protocol` stores them, of no machine."""
    rows = [
        {"protocol": "long", "implementation": name, "second": str(s), "ms": f"{base + 0.1 * s}",
         "ms_p20": f"{base - 0.1}", "ms_p80": f"{base + 1}", "sm_mhz": f"{1980 - 20 * s}",
         "power_w": "600"}
        for name, base in (("a2lib", 5.0), ("sdpa_cudnn", 4.0)) for s in range(seconds)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def drawn(root):
    """Every kind of figure and drawing that a page shows, by name."""
    rows = data.load("flash", [root])
    one_head = pick(rows, batch=1, heads=1, causal=True)
    board = pick(rows, batch=1, heads=16, head_dim=64, seq_len=16384, causal=True)
    paper = pick(rows[rows["batch"] * rows["seq_len"] == 16384], dtype="bf16")
    graph = one_head.assign(ms_graph=one_head["ms"] * 0.5)
    ceiling = {"bf16": 700.0, "fp32": 50.0}
    one = {"head_dim": 64, "dtype": "bf16"}
    return {
        "grid": figures.grid(one_head, "ms", down="pass", fixed={"head_dim": 64}),
        "column": figures.grid(one_head, "ms", down="pass", fixed=one),
        "rates": figures.grid(one_head, "tflops", down="pass", fixed=one,
                              lines=ceiling),
        "regimes": figures.latency_regimes(graph),
        "sustained": figures.sustained(protocol_rows()),
        "heat": figures.heat(one_head),
        "dots": figures.dots(board, 5.0, "best public"),
        "paper": figures.paper_shapes(paper, 700.0),
        "beside": figures.beside(one_head, data.load_reference("flash"), 64, "H200"),
        "tiles": drawing.tiles(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def texts(complete):
    """The SVG text of every figure."""
    return {name: chart._repr_svg_() for name, chart in drawn(complete).items()}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_letters_stand_out_on_the_page(theme):
    # WCAG 2.1, 1.4.11 for what is drawn and 1.4.3 for what is read.
    assert {n: c for n in LINES if (c := svg.contrast(theme[n], theme["paper"])) < 3} == {}
    for letters in ("ink", "dim"):
        assert svg.contrast(theme[letters], theme["paper"]) >= 4.5
    assert {n: c for n in FILLS if (c := svg.contrast(theme["ink"], theme[n])) < 4.5} == {}


def test_contrast_is_that_of_the_standard():
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert svg.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_every_colour_of_an_implementation_has_a_twin_in_the_dark():
    used = {*style.COLOURS, *(LOOKS.of(name).colour for name in [*LOOKS, "unheard of"])}
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
        assert svg.smallest_text(text) >= svg.LEAST_SIZE, name
        assert "DejaVu" not in text and "<metadata" not in text, name
    assert "SDPA FA2</text>" in texts["column"] and "memory-efficient" not in texts["column"]


def test_the_size_of_letters_is_measured():
    text = '<svg viewBox="0 0 684 100"><style>.a{font-size:10px}.b{font:18px x}</style></svg>'
    assert svg.smallest_text(text) == pytest.approx(5)


def test_a_number_in_a_label_keeps_its_digits():
    text = '<svg viewBox="0 0 1 1"><path d="M 0.12345 7.0004"/><text>0.0123 ms</text></svg>'
    assert "0.0123 ms" in svg.themed(text) and 'd="M0.12 7"' in svg.themed(text)


def test_a_panel_of_seven_lines_is_light(texts):
    # Of an earlier form 197 kB, most of it letters drawn as paths and minor ticks.
    assert max(map(len, texts.values())) < 70_000


def test_names_do_not_touch_and_keep_the_order_of_their_lines():
    wanted = [5.0, 5.1, 5.2, 50.0, 4.9, 99.0]
    found = panels.places(wanted, line=10, low=0, high=100)
    by_want = [height for _, height in sorted(zip(wanted, found, strict=True))]
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(by_want))
    assert by_want[0] >= 5 and by_want[-1] <= 95
    assert found[3] == 50 and found[5] == 95


def test_a_name_that_has_room_stands_where_its_line_ends():
    assert panels.places([30, 70], line=10, low=0, high=100) == [30, 70]
    assert panels.places([50, 50], line=10, low=0, high=100) == [45, 55]
    assert panels.places([], line=10, low=0, high=100) == []


def test_more_names_than_room_still_do_not_touch():
    found = panels.places([1, 2, 3, 4], line=10, low=0, high=20)
    assert [b - a for a, b in pairwise(found)] == [10, 10, 10]


def test_one_column_names_its_lines_and_two_have_a_legend(texts):
    names = [LOOKS.short(name) for name in LOOKS if name != "tiled"]
    for name in names:
        assert texts["column"].count(f">{name}</text>") == 3, name  # once a panel
        assert texts["grid"].count(f">{name}</text>") == 1, name  # once in the legend


def cell(ours, peer, spread=0.001):
    rows = [("a2lib", ours), ("eager", 99.0), ("flex", peer)]
    return pd.DataFrame([{"implementation": name, "ms": ms, "ms_p20": ms and ms - spread,
                          "ms_p80": ms and ms + spread} for name, ms in rows])  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "peer", "spread", "ratio", "even"),
    [(2.0, 1.0, 0.001, 2.0, False), (1.0, 4.0, 0.001, 0.25, False),
     (1.0, 1.015, 0.001, 1 / 1.015, True), (1.0, 1.2, 0.15, 1 / 1.2, True)],
)  # fmt: skip
def test_a_cell_of_the_heatmap(ours, peer, spread, ratio, even):
    assert metrics.against_best(cell(ours, peer, spread), VIEW) == (pytest.approx(ratio), even)


def test_a_cell_without_a_time_of_ours_says_nothing():
    ratio, even = metrics.against_best(cell(None, 1.0), VIEW)
    assert ratio != ratio and not even


def test_the_heatmap_says_each_ratio_and_colours_who_is_ahead():
    shapes = {(128, 64): (1.0, 4.0), (256, 64): (1.0, 1.001), (512, 64): (3.0, 1.0)}
    cells = [cell(*times).assign(seq_len=n, head_dim=d) for (n, d), times in shapes.items()]
    rows = pd.concat(cells).assign(dtype="bf16", **{"pass": "forward"})
    text = figures.heat(rows)._repr_svg_()
    assert all(f">{words}</text>" in text for words in ("0.25", "1.00", "3.00"))
    # The cells from the shortest sequence on, then the legend: ours ahead, level, a peer ahead.
    names = dict(re.findall(r"\.(\w+)\{[^}]*fill:var\(--((?:ahead|behind)3|level)\)", text))
    drawn = [names[one] for one in re.findall(r"class=\"(\w+)\"", text) if one in names]
    assert drawn == ["ahead3", "level", "behind3"] * 2


def test_level_is_two_per_cent_or_quantiles_that_overlap():
    def row(ms, low, high):
        return pd.Series({"ms": ms, "ms_p20": low, "ms_p80": high})

    assert metrics.level(row(1.0, 1.0, 1.0), row(1.019, 1.019, 1.019))
    assert not metrics.level(row(1.0, 0.99, 1.01), row(1.1, 1.09, 1.11))
    assert metrics.level(row(1.0, 0.9, 1.2), row(1.1, 1.09, 1.11))
    missing = float("nan")
    assert not metrics.level(row(1.0, missing, missing), row(1.1, missing, missing))


def test_regimes_need_no_graph_times(complete):
    rows = pick(data.load("flash", [complete]), batch=1, heads=1, causal=True)
    text = figures.latency_regimes(rows)._repr_svg_()
    assert text.count(">ours</text>") == 3 and "not measured yet" not in text
    assert "not measured yet" in figures.latency_regimes(rows.iloc[:0])._repr_svg_()


def test_figures_of_no_rows_say_so(complete):
    nothing = data.load("flash", [complete]).iloc[:0]
    for chart in (figures.heat(nothing), figures.sustained(protocol_rows(0).reindex(
            columns=protocol_rows().columns)), figures.dots(nothing)):  # fmt: skip
        assert "not measured yet" in chart._repr_svg_()


def test_a_dot_that_is_level_with_the_fastest_is_bold_too(complete):
    rows = pick(data.load("flash", [complete]), pass_="forward").drop_duplicates("implementation")
    rows = rows[rows["implementation"].isin(["a2lib", "flex", "eager"])].assign(
        ms=[1.0, 1.01, 2.0], ms_p20=[1.0, 1.01, 2.0], ms_p80=[1.0, 1.01, 2.0])  # fmt: skip
    text = figures.dots(rows)._repr_svg_()
    bold = re.findall(r"\.(\w+)\{[^}]*font-weight:700", text)
    words = re.findall(rf'class="(?:{"|".join(bold)})"[^>]*>([^<]+)</text>', text)
    assert sorted(words) == ["1.00", "1.01"]


def test_the_tiles_of_a_causal_mask_are_counted_by_their_elements():
    n, bq, bk = 12, 4, 3
    counts = Counter()
    for i in range(0, n, bq):
        for j in range(0, n, bk):
            seen = [key <= query for query in range(i, i + bq) for key in range(j, j + bk)]
            counts["full" if all(seen) else "mask" if any(seen) else "skip"] += 1
    picture = drawing.tiles(n, bq, bk)
    assert picture.counts == counts
    text = picture._repr_svg_()
    assert f"{counts['full']} whole" in text and f"{counts['skip']} of 12 never" in text


def test_tiles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="allowed are 1 to 64"):
        drawing.tiles(64, 128, 32)
