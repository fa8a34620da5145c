"""The book's drawings, files of SVG: one style, words that fit, numbers that are true."""

import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from svg_sizes import LEAST_SIZE, smallest_text

from a2lib.paths import ROOT
from a2lib.report import style
from a2lib.report.pages.timeline import CATEGORIES
from a2lib.report.plots import HEAT
from a2lib.report.units import percent
from a2lib.theory import eager
from a2lib.theory.accounting import Mesh
from a2lib.theory.attention import attention_flops
from a2lib.theory.other_axes import bubble_share

FILES = {file.stem: file for file in sorted((ROOT / "book" / "drawings").iterdir())}
FIGURE = re.compile(r"^```\{figure\} drawings/(\S+)\.svg\n---\n(.*?)^---$", re.M | re.S)
PALETTE = {*style.COLOURS, *HEAT, *CATEGORIES.values(), style.INK, style.PAPER, style.DIM}
PALETTE |= {"none", "currentColor"}
WIDTH, LETTER = 360, 12


def read(name):
    """Return the root of a drawing, its tags without their namespace."""
    root = ElementTree.fromstring(FILES[name].read_text(encoding="utf-8"))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def words(element, left=0.0, top=0.0, classes=frozenset()):
    """Yield what is written in an element: the words, the x where they begin and end, and their
    baseline. A text with several x has a letter at each."""
    classes = classes | set(element.get("class", "").split())
    move = element.get("transform")
    if move:
        x, y = map(float, re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\)", move).groups())
        left, top = left + x, top + y
    if element.tag == "text":
        places = list(map(float, element.get("x", "0").split()))
        pieces = element.text if len(places) > 1 else [element.text]
        weight = "bold" if "bold" in classes else "normal"
        font = FontProperties(family="DejaVu Sans", size=LETTER, weight=weight)
        anchor = 1 if "end" in classes else 0.5 if "mid" in classes else 0
        for piece, x in zip(pieces, places, strict=True):
            wide, _, _ = TextToPath().get_text_width_height_descent(piece, font, ismath=False)
            begin = left + x - wide * anchor
            yield piece, begin, begin + wide, top + float(element.get("y", "0"))
    for child in element:
        yield from words(child, left, top, classes)


def text(name):
    """All that is written in a drawing, a line for each text."""
    return "\n".join(element.text for element in read(name).iter("text"))


@pytest.mark.parametrize("name", FILES)
def test_a_drawing_has_the_one_style_and_its_words_fit_and_do_not_touch(name):
    source, root = FILES[name].read_text(encoding="utf-8"), read(name)
    assert root.find("style").text == read("flash-merge").find("style").text
    for colour in re.findall(r'\b(?:fill|stroke|color)(?:: |=")([^;"} ]+)', source):
        assert colour in PALETTE or colour.startswith("url(#"), colour
    assert root.get("viewBox") == f"0 0 {WIDTH} {root.get('height')}"
    assert smallest_text(source) >= LEAST_SIZE
    for tag in ("image", "script", "foreignObject"):
        assert not count(root, tag)
    places = list(words(root))
    for piece, begin, end, y in places:
        assert 0 <= begin and end <= WIDTH, piece
        assert LETTER - 2 <= y <= float(root.get("height")) - 3, piece
    for (one, begin, end, y), (other, other_begin, other_end, other_y) in combinations(places, 2):
        is_beside = end <= other_begin or other_end <= begin
        assert is_beside or abs(y - other_y) >= LETTER, (one, other)


def test_each_is_on_a_page_and_says_in_words_what_it_shows():
    described = {}
    for page in (ROOT / "book").glob("*.md"):
        for name, options in FIGURE.findall(page.read_text(encoding="utf-8")):
            figure = yaml.safe_load(options)
            assert figure["name"] == f"fig-{name}"
            described[name] = figure["alt"]
    assert described.keys() == FILES.keys()
    for name, alt in described.items():
        root = read(name)
        assert root.get("role") == "img" and root.find("title").text
        assert " ".join(root.find("desc").text.split()) == alt, name


def test_the_two_tiles_merge_as_it_is_written():
    lines = text("flash-merge").split("\n")
    one, other = filter(str.isdigit, lines)
    one, other = np.array(list(one), int), np.array(list(other), int)
    assert (one.max(), other.max()) == (3, 4)
    first, second = np.exp(one - 3).sum(), np.exp(other - 4).sum()
    whole = np.exp(np.concatenate([one, other]) - 4).sum()
    assert np.exp(3 - 4) * first + second == pytest.approx(whole)
    for line in (
        f"ℓ = {first:.2f}, the sum",
        f"ℓ = {second:.2f}, the sum",
        f"ℓ = exp(3 − 4) · {first:.2f} + {second:.2f} = {whole:.2f}",
    ):
        assert line in lines


def numbers(pattern, drawing):
    return list(map(int, re.findall(pattern, text(drawing))))


def test_counts_of_tiles_matmuls_and_passes():
    n = 8
    below = n * (n - 1) // 2
    assert numbers(r"\d+", "flash-tiles") == [below, n, below, n * n]

    sizes = 1, 1, 1024, 1024, 64, True
    one, *two = numbers(r"(\d) matmuls", "flash-sweeps")
    assert one == 2 * attention_flops(*sizes, "backward") / attention_flops(*sizes, "forward")
    assert sum(two) == one + 2  # S and dP twice

    eager_passes, compiled_passes = numbers(r"(\d) times", "compile-fusion")
    products = eager.PRODUCTS["forward"]
    assert eager_passes == products + eager.BETWEEN["eager", False]["forward"]
    assert compiled_passes == products + eager.BETWEEN["compile", False]["forward"]


def test_the_pipelines_idle_for_as_long_as_is_written():
    written = text("axes-bubble").replace(" %", "\N{NO-BREAK SPACE}%")
    for microbatches in (4, 8):
        idle = percent(bubble_share("1f1b", 4, microbatches))
        assert f"{microbatches} micro-batches: idle for {idle}" in written


def test_a_ring_passes_on_what_it_received_the_round_before():
    rows = list(filter(str.isdigit, text("parallelism-rings").split("\n")))
    for rounds, drawn in ((3, rows[:4]), (6, rows[4:])):
        for device, row in enumerate(drawn):
            assert len(row) == rounds
            for step, digit in enumerate(row):
                assert int(digit) == (device - step) % 4
    seen = numbers(r"KV (\d)", "axes-exchange")
    for place, chunk in enumerate(seen):
        device, step = divmod(place, 4)
        assert chunk == (device - step) % 4
    assert (len(rows), len(seen)) == (8, 16)


def test_a_ring_of_three_adds_chunks_and_passes_the_sums_on():
    ranks = range(3)
    held = [[1, 1, 1] for _ in ranks]
    rounds = ["".join(map(str, row)) for row in held]
    for step in range(4):
        before = [list(row) for row in held]
        for rank in ranks:
            beside = (rank + 1) % 3
            is_adding = step < 2
            chunk = (rank - step) % 3  # in the third round, the one that it has just completed
            kept = before[beside][chunk] if is_adding else 0
            held[beside][chunk] = before[rank][chunk] + kept
        rounds += ["".join(map(str, row)) for row in held]
    drawn = [line for line in text("collectives-ring").split("\n") if line.isdigit()]
    assert drawn == rounds
    assert rounds[-3:] == ["333"] * 3


def test_a_backward_begins_with_the_last_layer_and_sends_after_it_computes():
    forward, backward = text("parallelism-fsdp").split("\nbackward\n")
    assert re.findall(r"C(\d)", forward) == re.findall(r"C(\d)", backward)[::-1]
    assert re.findall(r"S(\d)", backward) == ["4", "3", "2", "1"]

    forward, backward = text("parallelism-tensor").split("\nbackward\n")
    orders = []
    for drawn in (forward, backward):
        computed = re.findall(r"C(\d[ab])", drawn)
        assert computed == re.findall(r"R(\d[ab])", drawn)
        orders.append(computed)
    assert orders == [["1a", "1b", "2a", "2b"], ["2a", "2b", "1a", "1b"]]


def count(root, path):
    """Return how many elements of a drawing there are by a path of ElementTree's."""
    return len(root.findall(f".//{path}"))


def strokes(root, name):
    """Return how many strokes the path of this id has."""
    return root.find(f".//path[@id='{name}']").get("d").count("M")


def test_the_torus_has_the_devices_and_axes_of_the_mesh():
    mesh = Mesh()
    root = read("communication-torus")
    assert strokes(root, "plane") == mesh.X
    assert count(root, "use[@href='#plane'][@class='blue']") == 1
    assert count(root, "use[@href='#plane'][@class='thin']") == mesh.Y
    assert count(root, "use[@href='#place'][@class='orange']") == mesh.Y
    assert numbers(r"[XY] = (\d+)", "communication-torus") == [mesh.X, mesh.Y]
    # Two arrows along a plane, one along the row of planes: the torus axes of X and of Y.
    assert count(root, "path[@class='arrow']") == mesh.M_X + mesh.M_Y


def test_the_grid_has_the_axes_of_the_405b_layout():
    root = read("layout-grid")
    tensor, stages = strokes(root, "stage"), strokes(root, "pipeline")
    assert count(root, "use[@href='#stage'][@class='thin']") == stages
    assert numbers(r"(\d+) (?:GPUs of|stages|such)", "layout-grid") == [tensor, stages, 128]
    assert f"{tensor * stages * 128:,} GPUs" in text("layout-grid")
