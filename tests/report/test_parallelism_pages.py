"""What the pages on parallelism say and draw: numbers by value, drawings by what is in them."""

import itertools
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from a2lib.paths import ROOT
from a2lib.report import svg
from a2lib.report.chapters.parallelism import (
    accounting,
    axes,
    calculator,
    clocks,
    layer,
    plans,
    schemes,
)
from a2lib.theory.layouts import AXES, SHARDINGS, STRATEGIES, Layout, evaluate
from a2lib.theory.parallelism import EXAMPLE, Layer, communication_share

DRAWINGS = {
    "data": schemes.data_parallel, "fsdp": schemes.fully_sharded,
    "tensor": schemes.tensor_parallel, "mesh": schemes.mesh,
    "exchange": schemes.experts_and_contexts, "holds": schemes.other_axes,
    "rings": clocks.rings, "pipelines": clocks.pipelines, "map": layer.mesh_map,
    "sensitivity": accounting.sensitivity,
}  # fmt: skip
# a = 6 and b = 3 by hand: C = W, two bytes, 6 tokens, d_ff 2.
BY_HAND = Layer(tokens=6, d_model=5, d_ff=2, flops=1e12, bandwidth=1e12)


@pytest.fixture(scope="module")
def texts():
    return {name: draw()._repr_svg_() for name, draw in DRAWINGS.items()}


def words_of(text):
    tree = ElementTree.fromstring(text)
    return ["".join(node.itertext()) for node in tree.iter() if node.tag.endswith("text")]


def test_every_drawing_has_both_themes_and_letters_for_a_phone(texts):
    for name, text in texts.items():
        assert text.count("prefers-color-scheme:dark") == 1, name
        assert re.findall(r"#[0-9a-f]{6}\b", re.sub(r"--\w+:#[0-9a-f]{6}", "", text)) == [], name
        assert svg.smallest_text(text) >= svg.LEAST_SIZE, name
        assert len(text) < 70_000, name


def test_words_stay_inside_the_drawing(texts):
    """By the widths of DejaVu Sans, which is wider than what browsers draw with elsewhere."""
    for name in ("data", "fsdp", "tensor", "mesh", "exchange", "holds", "rings", "pipelines"):
        bold = re.findall(r"\.(\w+)\{[^}]*font-weight:700", texts[name])
        for node in ElementTree.fromstring(texts[name]).iter():
            if node.tag.endswith("text") and node.get("transform") is None:
                weight = 700 if node.get("class") in bold else 400
                font = FontProperties(family="DejaVu Sans", weight=weight)
                words = "".join(node.itertext())
                wide = TextPath((0, 0), words, size=12, prop=font).get_extents().width
                share = {"start": 0, "middle": 0.5, "end": 1}[node.get("text-anchor")]
                left = float(node.get("x")) - share * wide
                assert left >= 0 and left + wide <= 360, (name, words)


def test_the_rings_are_drawn_to_one_scale():
    drawn = clocks.rings(5)
    assert drawn.counts == {"whole": 4 * 5, "chunked": 2 * 4}
    assert "whole tensors: 4 rounds" in words_of(drawn._repr_svg_())


def test_the_first_round_sends_ones_own_tensor(texts):
    numbers = [word for word in words_of(texts["rings"]) if re.fullmatch(r"\d", word)]
    whole, chunked = numbers[: 4 * 3], numbers[4 * 3 :]
    assert whole == list("032" "103" "210" "321")
    # Device i ends the first half with the sum of chunk i + 1, and sends that next.
    assert len(chunked) == 4 * 6 and [chunked[6 * i + 3] for i in range(4)] == list("1230")


def test_the_pipelines_are_drawn_with_their_bubbles(texts):
    drawn = clocks.pipelines(4, 8)
    assert drawn.counts == {"gpipe": 27, "1f1b": 27, "interleaved": 16}  # 3/11, 3/11, 3/19
    words = words_of(texts["pipelines"])
    assert "GPipe: bubble 27 %, holds 8" in words and "1F1B: bubble 27 %, holds 4" in words
    assert texts["pipelines"].count("<rect") > 2 * 4 * 8 * 4


def test_who_holds_what(texts):
    assert schemes.experts_and_contexts().counts == {"kept": 4, "sent": 12}
    assert schemes.other_axes().counts == {"held": 4 + 3 + 2 + 1}
    assert {"experts", "sequence", "weights"} <= set(words_of(texts["holds"]))
    for name, tensors in (("tensor", {"W1, W2", "W3", "x1, x2, z"}), ("mesh", {"in use", "W3"})):
        assert tensors <= set(words_of(texts[name]))
    assert {"R1", "R4"} <= set(words_of(texts["data"]))
    assert {"G1", "S4"} <= set(words_of(texts["fsdp"]))


def test_the_layers_numbers_by_hand():
    said = layer.numbers(BY_HAND)
    assert (said["a"], said["b"]) == ("6.0", "3.00")
    assert (said["data_limit"], said["tensor_forward"], said["tensor_backward"]) == ("7", "4", "7")
    assert said["mesh_limit"] == "28"
    assert said["shared_limit"] == f"{27**2 / 72:.1f}"  # (6 + 3 + 18)^2 / (4 * 18)
    assert (said["shared_fsdp"], said["shared_tp"]) == ("4.5", "2.2")
    assert said["brute_overlap"] == "7 × 4 = 28" and said["brute_shared"] == "5 × 2 = 10"
    assert said["other_ratio"] == "4" and said["alpha"] == "1"


def test_the_layers_tables_by_hand():
    costs = layer.costs("words", "name", BY_HAND, 4).frame
    assert list(costs["largest N"]) == ["any", "7", "7", "7", "4", "7"]
    splits = layer.splits("words", "name").frame
    for _, n, how, _, share, whole, then in splits.itertuples():
        n_fsdp, n_tp = map(int, whole.split(" × "))
        assert n_fsdp * n_tp == n
        found = communication_share(EXAMPLE, n_fsdp, n_tp, how == "one after the other")
        assert then.strip("*") == f"{found:.2f}" and then.startswith("**") == (found > 1)
        assert float(share) <= found + 0.005
    tokens = layer.by_tokens("words", "name").frame
    assert len(set(tokens["TP alone, forward"])) == 1
    assert len(set(tokens["FSDP alone"])) == len(tokens)


def test_the_accountings_numbers():
    said = {name: text.replace("\N{NO-BREAK SPACE}", " ")
            for name, text in accounting.numbers().items()}  # fmt: skip
    assert said["state"] == "3,518 GB (3,276 GiB)" and said["one"] == "879 GB (819 GiB)"
    assert (said["h100"], said["devices"], said["most_tokens"]) == ("44", "38", "10,827")
    # 2556 / 8 = 319.4, times 64; 2556^2 / (2 * 53248) = 61.3.
    assert (said["least"], said["batch"], said["best"]) == ("320", "20,445", "62")
    X, Y = float(said["best_X"]), float(said["best_Y"])
    assert math.isclose(X * Y, 64, rel_tol=0.02) and Y == float(said["most_tp"])


def test_the_accountings_tables():
    devices = accounting.devices("words", "name").frame
    assert list(devices["N for 95 GB"])[0] == "38" and list(devices["N for 95 GB"])[-1] == "none"
    shown = [float(x) for x in devices["then a device has (GB)"][:-1]]
    assert all(x < 95 for x in shown)
    readings = accounting.readings("words", "name").frame
    assert readings["reading"][0].endswith("(ours)") and readings["overall"][0] == "20,445"
    ways = accounting.ways("words", "name").frame
    overall = [int(text.replace(",", "")) for text in ways["overall"]]
    assert overall[0] == max(overall) and overall[2] == min(overall)


def test_what_was_published_follows_from_its_own_arithmetic():
    frame = accounting.published("words", "name").frame
    for _, quantity, _, printed, own, ours in frame.itertuples():
        own = own.replace(",", "")
        assert math.isclose(float(printed), float(own), rel_tol=1e-3), quantity
        # Where the arithmetic is that of the question the answers agree, and else they do not.
        same = math.isclose(float(own), float(ours.split()[0].replace(",", "")), rel_tol=1e-3)
        assert same == (quantity[:3] != "(c)" and quantity[4:] != "saved for the backward (GB)")


def test_the_axes_numbers():
    said = axes.numbers()
    assert said["m_1f1b"] == "133"  # 7 / (m + 7) <= 1 / 20 from m = 133
    assert said["m_interleaved"] == "40"  # 7 / (4 m + 7) <= 1 / 20 from 33.25, in eights
    assert axes.bubbles("words", "name").frame.iloc[0, 2:].tolist() == [
        "43 %, 4", "43 %, 4", "16 %, 4",
    ]  # fmt: skip
    conditions = axes.conditions("words", "name").frame
    fast, slow = (
        [float(text.replace(",", "")) for text in conditions[name]]
        for name in conditions.columns[1:]
    )
    assert all(math.isclose(s / f, 9, rel_tol=0.01) for f, s in zip(fast, slow, strict=True))


def test_the_plans_are_the_planners():
    frame = plans.plans("words", "name").frame.set_index(" ")
    assert list(frame.columns)[:2] == ["8B on 2 H200", "8B on 64 H200"]
    for name, plan, job in zip(frame.columns, plans.planned(), (*plans.JOBS, plans.JOBS[-1]),
                               strict=True):  # fmt: skip
        column = frame[name]
        sizes = [int(column[axis]) for axis in AXES]
        assert math.prod(sizes) == int(column["devices used"].replace(",", "")) <= job.devices
        parts = sum(float(column[f"{part}, GB"]) for part in plan.memory)
        assert math.isclose(parts, float(column["together, GB"]), abs_tol=0.31)
        assert float(column["together, GB"]) <= float(column["allowed, GB"])
        assert plan == evaluate(job, plan.layout)
    hidden, apart = plans.planned()[2:]
    # what the prose says of the four: why two devices share a matrix, and what gives way
    two = plans.planned()[0].memory
    assert sorted(two, key=two.get)[-2:] == ["temporaries", "optimizer"]
    assert plans.planned()[0].layout.tensor == 2 and plans.planned()[1].layout.data == 64
    assert plans.planned()[1].layout.sharding == "zero1"
    for strategy, sharding in itertools.product(STRATEGIES, SHARDINGS):
        alone = Layout(data=2, sharding=sharding, checkpointing=strategy)
        assert evaluate(plans.JOBS[0], alone).memory_bytes > plans.JOBS[0].memory
    assert apart.layout.tensor < hidden.layout.tensor
    assert (hidden.layout.checkpointing, apart.layout.checkpointing) == ("none", "block")
    assert apart.serial_s < hidden.serial_s and hidden.step_s < apart.step_s


def test_the_choices_are_what_the_page_says_of_them():
    frame = calculator.choices("words", "name").frame.set_index("choice")
    assert frame["fits"].tolist() == ["no", "yes", "yes", "yes", "no", "no"]
    for (name, (job, layout)), most in zip(calculator.CHOICES.items(), frame["most a device"],
                                           strict=True):  # fmt: skip
        plan = evaluate(job, layout)
        line = frame.loc[name]
        assert float(line["GB each"]) == pytest.approx(plan.memory_bytes / 1e9, abs=0.5)
        assert (line["fits"] == "yes") == (plan.memory_bytes <= job.memory)
        assert float(line["step, s"]) == pytest.approx(plan.step_s, abs=0.005)
        tokens = float(line["tokens a second"].replace(",", ""))
        assert tokens == pytest.approx(job.batch * job.context / plan.step_s, rel=5e-3)
        # as many sequences a device fit, one more of each does not
        for more, fits in ((0, True), (1, False)):
            batch = (int(most) + more) * layout.data
            if batch:
                held = evaluate(replace(job, batch=batch), layout).memory_bytes
                assert (held <= job.memory) == fits, name
    said = calculator.numbers()
    # 8.13 billion parameters of 16 bytes
    assert said["fit_parameters"] == "8.1" and said["fit_state"] == "130\N{NO-BREAK SPACE}GB"
    assert said["fit_allowed"] == "127\N{NO-BREAK SPACE}GB" and said["fit_each"] == "4"
    order = [int(said[f"fit_{name}_most"]) for name in ("zero1", "fsdp", "again")]
    assert order == sorted(order) and order[0] > 0
    assert float(said["fit_fp32_kept"]) < 2
    assert 14 < float(said["fit_fp32_slower"]) < 16  # 989.4 / 66.9
    assert set(frame["bound by"]) == {"computation"}
    job, layout = calculator.CHOICES["FSDP, eager attention"]
    longer = replace(job, batch=job.batch // 2, context=2 * job.context)
    assert evaluate(longer, layout).bound == "memory bandwidth"
    # what the section on memory says of its fullest moment
    job, layout = calculator.CHOICES["replicas"]
    assert evaluate(job, layout).moment == "loss"
    short = replace(job, batch=8, context=64)
    assert evaluate(short, layout).moment == "after the backward"
    assert evaluate(job, replace(layout, microbatches=2)).moment == "accumulating"


@pytest.mark.parametrize(
    "page, said",
    [
        ("parallelism", layer.numbers),
        ("communication", accounting.numbers),
        ("parallelism-axes", lambda: axes.numbers() | plans.numbers()),
        ("calculator", calculator.numbers),
    ],
)
def test_a_page_glues_what_is_computed_and_nothing_else(page, said):
    text = (ROOT / "book" / f"{page}.md").read_text()
    glued = set(re.findall(r"\{glue:text\}`(\w+)`", text))
    assert glued <= set(said()) and glued
    assert set(said()) <= glued, "computed for nobody"
