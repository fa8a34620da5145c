"""The book's drawings, files of SVG: one style, words that fit, numbers that are true."""

import math
import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import yaml
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from schedules import Task, run
from svg_sizes import LEAST_SIZE, smallest_text

from a2lib.paths import ROOT
from a2lib.report import style
from a2lib.report.pages.timeline import CATEGORIES
from a2lib.report.plots import HEAT
from a2lib.report.units import percent
from a2lib.theory import eager
from a2lib.theory.attention import attention_flops
from a2lib.theory.other_axes import bubble_share, peak_microbatches

FILES = {file.stem: file for file in sorted((ROOT / "book" / "drawings").iterdir())}
FIGURE = re.compile(r"^```\{figure\} drawings/(\S+)\.svg\n---\n(.*?)^---$", re.M | re.S)
PALETTE = {*style.COLOURS, *HEAT, *CATEGORIES.values(), style.INK, style.PAPER, style.DIM}
WIDTH, LETTER = 360, 12
# A stroke of x, y and a length across, as the boxes of a row are drawn.
ACROSS = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)")


def read(name):
    """The root of a drawing, its tags without their namespace."""
    root = ElementTree.fromstring(FILES[name].read_text(encoding="utf-8"))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def words(element, left=0.0, top=0.0, classes=frozenset()):
    """What is written in an element: the words, and the x where they begin and end, and their
    baseline. A text with several x has a letter at each."""
    classes = classes | set(element.get("class", "").split())
    if move := element.get("transform"):
        x, y = map(float, re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\)", move).groups())
        left, top = left + x, top + y
    if element.tag == "text":
        places = [left + float(x) for x in element.get("x", "0").split()]
        pieces = element.text if len(places) > 1 else [element.text]
        weight = "bold" if "bold" in classes else "normal"
        font = FontProperties(family="DejaVu Sans", size=LETTER, weight=weight)
        for piece, x in zip(pieces, places, strict=True):
            wide, _, _ = TextToPath().get_text_width_height_descent(piece, font, ismath=False)
            begin = x - wide * (1 if "end" in classes else 0.5 if "mid" in classes else 0)
            yield piece, begin, begin + wide, top + float(element.get("y", "0"))
    for child in element:
        yield from words(child, left, top, classes)


def text(name):
    """All that is written in a drawing, a line for each text."""
    return "\n".join(element.text for element in read(name).iter("text"))


@pytest.mark.parametrize("name", FILES)
def test_a_drawing_has_the_one_style_and_the_colours_of_the_plots(name):
    source, root = FILES[name].read_text(encoding="utf-8"), read(name)
    assert root.find("style").text == read("flash-merge").find("style").text
    colours = re.findall(r'\b(?:fill|stroke|color)(?:: |=")([^;"} ]+)', source)
    assert {c for c in colours if not c.startswith("url(#")} <= PALETTE | {"none", "currentColor"}
    assert root.get("viewBox") == f"0 0 {WIDTH} {root.get('height')}"
    assert smallest_text(source) >= LEAST_SIZE
    assert not {element.tag for element in root.iter()} & {"image", "script", "foreignObject"}


@pytest.mark.parametrize("name", FILES)
def test_its_words_fit_and_do_not_touch(name):
    root = read(name)
    places = list(words(root))
    for piece, begin, end, y in places:
        assert 0 <= begin and end <= WIDTH, piece
        assert LETTER - 2 <= y <= float(root.get("height")) - 3, piece
    for (one, begin, end, y), (other, *around, at) in combinations(places, 2):
        apart = end <= around[0] or around[1] <= begin
        assert apart or abs(y - at) >= LETTER, (one, other)


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
    tiles = [[int(digit) for digit in line] for line in lines if line.isdigit()]
    row = tiles[0] + tiles[1]
    sums = [sum(math.exp(s - max(tile)) for s in tile) for tile in (*tiles, row)]
    a, b, whole = (f"{total:.2f}" for total in sums)
    assert [f"ℓ = {a}, the sum", f"ℓ = {b}, the sum"] == [w for w in lines if "the sum" in w]
    assert [max(tile) for tile in tiles] == [3, 4]
    assert [int(w[4]) for w in lines if "the largest" in w] == [3, 4]
    assert f"ℓ = exp(3 − 4) · {a} + {b} = {whole}" in lines
    assert math.exp(3 - 4) * sums[0] + sums[1] == pytest.approx(sums[2])


def test_counts_of_tiles_matmuls_and_passes():
    n = 8
    below = n * (n - 1) // 2
    counts = [int(number) for number in re.findall(r"\d+", text("flash-tiles"))]
    assert counts == [below, n, below, n * n]

    def flops(pass_):
        return attention_flops(1, 1, 1024, 1024, 64, True, pass_)

    one, *two = map(int, re.findall(r"(\d) matmuls", text("flash-sweeps")))
    assert one == 2 * flops("backward") / flops("forward")
    assert sum(two) == one + 2  # S and dP twice

    passes = [int(number) for number in re.findall(r"(\d) passes", text("compile-fusion"))]
    between = [eager.BETWEEN[way, False]["forward"] for way in ("eager", "compile")]
    assert passes == [number + eager.PRODUCTS["forward"] for number in between]


@pytest.mark.parametrize("name", ["flash-roles-forward", "flash-roles-backward"])
def test_nobody_does_two_things_at_once(name):
    lanes = {}
    for box in read(name).findall("rect")[1:]:  # the first is the paper
        begin = float(box.get("x"))
        lanes.setdefault(box.get("y"), []).append((begin, begin + float(box.get("width"))))
    assert len(lanes) == 4
    for boxes in lanes.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(boxes))


def test_the_cartoon_has_the_colours_of_the_timeline():
    fills = re.findall('fill="(#.*?)"', FILES["memory-cartoon"].read_text(encoding="utf-8"))
    assert set(fills) == {c for name, c in CATEGORIES.items() if name != "other"}


def test_a_ring_passes_on_what_it_received_the_round_before():
    rows = [line for line in text("parallelism-rings").split("\n") if line.isdigit()]
    assert [len(row) for row in rows] == [3] * 4 + [6] * 4
    for i, row in enumerate(rows):
        assert [int(digit) for digit in row] == [(i - t) % 4 for t in range(len(row))]
    seen = re.findall(r"KV (\d)", text("axes-exchange"))
    assert [int(digit) for digit in seen] == [(i - t) % 4 for i in range(4) for t in range(4)]


def one_forward_one_backward(stages, microbatches):
    """When each task of the schedule 1F1B runs: a forward takes 1 s, a backward 2 s."""
    tasks = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)  # forwards before the first backward
        order = [("forward", i) for i in range(ahead)]
        for i in range(microbatches):
            order.append(("backward", i))
            if ahead + i < microbatches:
                order.append(("forward", ahead + i))
        for kind, i in order:
            before = stage - 1 if kind == "forward" else stage + 1
            received = (f"{kind} {before} {i}",) if 0 <= before < stages else ()
            seconds = 1.0 if kind == "forward" else 2.0
            tasks.append(Task(f"{kind} {stage} {i}", f"{stage}", seconds, received))
    return run(tasks)


@pytest.mark.parametrize("stages, microbatches", [(4, 4), (4, 8), (8, 3), (1, 2)])
def test_a_pipeline_has_the_formulas_bubble_and_activations(stages, microbatches):
    timeline = one_forward_one_backward(stages, microbatches)
    bubble = bubble_share("1f1b", stages, microbatches)
    assert 1 - 3 * microbatches / timeline.seconds == pytest.approx(bubble)
    for stage in range(stages):
        own = [task.name for task in timeline.tasks if task.stream == f"{stage}"]
        held, peak = 0, 0
        for name in sorted(own, key=timeline.start.get):
            held += 1 if name.startswith("forward") else -1
            peak = max(peak, held)
        assert peak == peak_microbatches("1f1b", stages, microbatches, stage=stage)


def test_the_pipelines_that_are_drawn_are_those_of_the_schedule():
    root, left, unit = read("axes-bubble"), 60, 9
    drawn = set()  # stage as its height, kind, start
    for group in root.iter("g"):
        kind = {"blue": "forward", "orange": "backward"}.get(group.get("class"))
        length = unit if kind == "forward" else 2 * unit
        for path in group.iter("path"):
            for x, y, wide in ACROSS.findall(path.get("d")):
                for begin in range(int(x), int(x) + int(wide), length):
                    drawn.add((int(y), kind, (begin - left) / unit))
    expected = set()
    for top, microbatches in ((33, 4), (161, 8)):
        timeline = one_forward_one_backward(4, microbatches)
        for name, start in timeline.start.items():
            kind, stage, _ = name.split()
            expected.add((top + 24 * int(stage), kind, start))
        bubble = bubble_share("1f1b", 4, microbatches)
        written = f"{microbatches} micro-batches: idle for {percent(bubble)}"
        assert written.replace("\N{NO-BREAK SPACE}", " ") in text("axes-bubble")
    assert drawn == expected
