"""The book's drawings, files of SVG: one style, words that fit, numbers that are true."""

import math
import re
from itertools import combinations
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
PALETTE |= {"none", "currentColor"}
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
    """Yield what is written in an element: the words, the x where they begin and end, and their
    baseline. A text with several x has a letter at each."""
    classes = classes | set(element.get("class", "").split())
    if move := element.get("transform"):
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
    assert not {element.tag for element in root.iter()} & {"image", "script", "foreignObject"}
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
    one, other = (list(map(int, line)) for line in lines if line.isdigit())

    def row_sum(scores):
        return sum(math.exp(score - max(scores)) for score in scores)

    first, second, whole = row_sum(one), row_sum(other), row_sum(one + other)
    assert (max(one), max(other)) == (3, 4)
    assert math.exp(3 - 4) * first + second == pytest.approx(whole)
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


def test_a_ring_passes_on_what_it_received_the_round_before():
    rows = [line for line in text("parallelism-rings").split("\n") if line.isdigit()]
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


def one_forward_one_backward(stages, microbatches):
    """When each task of the schedule 1F1B runs: a forward takes 1 s, a backward 2 s."""
    tasks = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)  # forwards before the first backward
        order = []
        for i in range(microbatches + ahead):
            if i >= ahead:
                order.append(("backward", i - ahead))
            if i < microbatches:
                order.append(("forward", i))
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
        held, peak = 0, 0
        for task in timeline.tasks:  # those of a stage in their order
            if task.stream == f"{stage}":
                held += 1 if task.name.startswith("forward") else -1
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
