"""What "Paper beside hardware" says, by value: rows made by hand."""

import functools
import math

import pytest
from parallelism_rows import BY_BATCH, BY_WIDTH, GIB, chapter, collective, lines, row, sent

from a2lib.report import svg
from a2lib.report.chapters.parallelism_measured import (
    Beside,
    answer,
    compared,
    drawn,
    local,
    overlap,
    rows,
    why,
)
from a2lib.theory.parallelism import Layer


@pytest.fixture
def made(synthetic, tmp_path):
    return functools.partial(chapter, synthetic, tmp_path)


@pytest.fixture
def empty(tmp_path):
    return Beside([tmp_path])


def test_the_answer_without_rows_is_the_makers(empty):
    # 989.4e12 / 450e9
    assert str(answer.sentence(empty)) == (
        "**The answer.** By its maker's figures, C = 989 TFLOP/s and W = 450 GB/s, communication "
        "of data parallelism and FSDP hides on 2 H200 from a batch of 2,199 tokens on. **Not "
        "measured yet on an NVIDIA H200**: C, W, and what the schemes take."
    )


def test_c_and_w_are_measured_in_the_run(made):
    (machine,) = made([*BY_BATCH, *BY_WIDTH]).machines
    assert (machine.layer.flops, machine.layer.bandwidth) == pytest.approx((1e12, 1e9))
    assert (machine.label, machine.layers, machine.layer.d_ff) == ("NCCL, 2 GPUs", 2, 1000)
    # Without a message of data parallelism there is no W, and nothing is predicted.
    p = made(BY_WIDTH)
    assert p.machines == [] and p.table["floor"].isna().all()
    # The best rate, the middle of what is sent; four bytes are twice as long on the wire.
    more = [row("dp", "backward", 4000, 60, 24, 6), row("dp", "backward", 8000, 99, 96, 24)]
    (machine,) = made([*BY_BATCH, *more]).machines
    assert (machine.layer.flops, machine.layer.bandwidth) == pytest.approx((2e12, 1e9))
    (machine,) = made([{**one, "dtype": "fp32"} for one in BY_BATCH]).machines
    assert machine.layer.bandwidth == pytest.approx(2e9)


def test_predictions_stand_beside_the_rows(made):
    p = made([*BY_BATCH, *BY_WIDTH])
    found = {(r.scheme, r.phase, r.tokens, r.d_ff): r for r in p.table.itertuples()}

    def of(*key):
        r = found[key]
        return pytest.approx((r.compute, r.messages, r.floor, r.clock), rel=1e-9)

    # The first layer's 3 ms, then two messages; two layers of 12, then a message.
    assert (6, 12, 12, 15) == of("dp", "backward", 500, 1000)
    assert (24, 12, 24, 30) == of("dp", "backward", 2000, 1000)
    assert (36, 12, 36, 42) == of("dp", "end_to_end", 2000, 1000)
    assert (3, 6, 6, 7.5) == of("fsdp", "forward", 500, 1000)
    assert (12, 6, 12, 15) == of("fsdp", "forward", 2000, 1000)
    # Each in halves: a sum of 1 ms is hidden, but for the last.
    assert (6, 4, 6, 7) == of("tp", "forward", 1000, 1000)
    assert found["dp", "backward", 2000, 1000].off == pytest.approx(0.1)
    assert found["fsdp", "forward", 2000, 1000].hidden == pytest.approx(0)
    assert found["dp", "backward", 500, 1000].hidden == pytest.approx(0.5)
    assert math.isnan(found["dp", "forward", 500, 1000].hidden)


def test_a_clock_for_every_scheme(made):
    """The forward of a mesh adds both axes up; its backward has no schedule and takes the sum."""
    on = {"world_size": 4}
    dp = [row("dp", "backward", 4000, 30, 24, 18, mesh="4x1", **on),
          row("dp", "forward", 4000, 12, 12, mesh="4x1", **on)]  # fmt: skip
    both = [row("fsdp_tp", p, 4000, 99, 9, 9, mesh="2x2", **on) for p in ("forward", "backward")]
    p = made([*dp, *both])
    (machine,) = p.machines
    assert (machine.layer.flops, machine.layer.bandwidth) == pytest.approx((1e12, 1e9))
    forward, backward = p.table[p.table["scheme"] == "fsdp_tp"].itertuples()
    # A gather of 3 MB in halves, a sum of 4 MB: 1.5 and 4 ms a layer, at 6 and 12 ms of products.
    assert (forward.compute, forward.messages, forward.floor) == pytest.approx((12, 11, 12))
    assert (backward.compute, backward.messages) == pytest.approx((24, 14))
    assert backward.clock == pytest.approx(backward.floor) == pytest.approx(24)
    assert 12 < forward.clock <= 12 + 11


def test_whether_axes_share_their_links(made, empty):
    dp = row("dp", "backward", 4000, 30, 24, 18, mesh="4x1", world_size=4)
    on = {"mesh": "2x2", "world_size": 4}
    both = [row("fsdp_tp", "backward", n, 99, 9, sent, ms_data=6, ms_tensor=4, **on)
            for n, sent in ((4000, 9), (8000, 9), (16000, 12))]  # fmt: skip
    assert (
        "at once take, against each axis' alone: FSDP × TP 2 × 2 with NCCL, 4 GPUs: 0.90 times "
        "their sum, 1.50 times the longer (medians"
    ) in str(answer.sharing(made([dp, *both])))
    assert "Not measured yet" in str(answer.sharing(made(BY_BATCH)))
    assert "Not measured yet" in str(answer.sharing(empty))


def test_the_answer_with_rows(made):
    said = str(answer.sentence(made([*BY_BATCH, *BY_WIDTH])))
    assert (
        "this layer has C = 1.00 TFLOP/s and W = 1.00 GB/s, and with these the formula says 1,000. "
        "The batch at which products and messages, each alone, take equally long backward is 1,000 "
        "for data parallel and 794 for FSDP."
    ) in said
    # 0 five times, 0.1, 0.125, 0.143 three times, 0.167, 0.2, of which ten send; FSDP's backward at
    # 2,000 tokens has messages of half the time, which would make it 27 ms.
    assert said.startswith(
        "**The answer.** What binds is the predicted one in 10 of 10 passes that send; their times "
        "are +10% off the prediction on average: 0% as products alone are slower than C says, −1% "
        "as messages are than W says, +11% as both run at once. By its maker's figures, C = 989 "
    )


def test_gloo_on_the_first_screen(made):
    gloo = [{**one, "backend": "gloo"} for one in BY_BATCH]
    said = str(answer.sentence(made([*BY_BATCH, *gloo])))
    # Half of 6 and 3 of 12 ms, then 4.5 of 6 and 0 of 6.
    assert said.endswith(
        "\n\nWith gloo, between 2 processes on the CPU, the formula says 1,000 and found are 1,000 "
        "and 794, and of the shorter of both 38% runs beside the longer under data parallelism and "
        "38% under FSDP, where NCCL's is 38% and 38% (backward, in the middle of the batches)."
    )
    slow = [{**one, "ms_p80": one["ms"] + 5, "ms": one["ms"] + 5} for one in gloo]
    said = str(answer.sentence(made([*BY_BATCH, *slow])))
    assert ", but of the shorter of both nothing runs beside the longer under data" in said
    assert "With gloo" not in str(answer.sentence(made([*BY_BATCH, gloo[0]])))


def test_the_thresholds_by_scheme(made):
    found = lines(answer.thresholds(made([*BY_BATCH, *BY_WIDTH]), "c", "tab-c"), 3)
    assert {keys[1:]: cells[:4] for keys, cells in found.items()} == {
        ("data parallel", "backward"): ["tokens", "2,199", "1,000", "1,000"],
        ("FSDP", "forward"): ["tokens", "2,199", "1,000", "1,000"],
        ("FSDP", "backward"): ["tokens", "2,199", "1,000", "794"],
        ("tensor parallel", "forward"): ["d_ff", "1,466", "667", "667"],
        ("tensor parallel", "backward"): ["d_ff", "733", "333", "333"],
    }
    # FSDP's messages are as predicted at 500 and half at 2,000: 1/2 to a third at the crossing,
    # by which the threshold is lower.
    slower = {keys[1:]: cells[4:] for keys, cells in found.items()}
    assert slower.pop(("FSDP", "backward")) == ["1.00", "0.79"]
    assert set(map(tuple, slower.values())) == {("1.00", "1.00")}
    p = made([*BY_BATCH, *BY_WIDTH[:1], row("tp", "backward", 1000, 9, 3, 4)])
    (m,) = p.machines
    assert answer.found_threshold(p, m, "tp", (1, 2), "forward") == "below 1,000"
    assert answer.found_threshold(p, m, "tp", (1, 2), "backward") == "above 1,000"
    assert answer.found_threshold(p, m, "fsdp_tp", (2, 2), "backward") == "·"
    assert answer.slower_there(p, m, "tp", (1, 2), "forward") == ["·", "·"]
    assert rows.crossing([(1, 0.5), (2, 2)]) is None


def test_what_is_said_of_each_scheme(made):
    p = made([*BY_BATCH, *BY_WIDTH])
    # The first screen has the rest. 0 five times, 0.1, 0.125, 0.143 three times, 0.167, 0.2.
    near = (
        "Times of 12 passes are 0% to +20% off the prediction, +11% in the middle; the most is "
        "FSDP, forward, 2,000 tokens, d_ff 1,000. What binds is the predicted one in 10 of the 10 "
        "that send. Had C and W been what products and messages took alone each time, those would "
        "be off by 0% to +20%, +13% in the middle, which comes of both at once."
    )
    assert str(answer.verdicts(p, "nccl")) == f"- NCCL, 2 GPUs: {near}"
    gloo = [{**one, "backend": "gloo"} for one in (*BY_BATCH, *BY_WIDTH)]
    said = str(answer.verdicts(made([*BY_BATCH, *gloo]), "gloo"))
    assert said.startswith("- gloo, 2 processes: this layer has C = 1.00 TFLOP/s and W = 1.00 GB/s")
    assert said.endswith(near)
    assert "Not measured yet" in str(answer.verdicts(p, "gloo"))
    found = lines(compared.near(p, "c", "tab-c"), 2)
    # At 500 tokens messages take twice as long as products, at 2,000 half: 15 of 18 ms, hidden 3 of
    # 6.
    assert found["NCCL, 2 GPUs", "data parallel"] == [
        "2", "0%", "+5%", "+10%", "50%", "backward, 500 tokens, d_ff 1,000",
    ]  # fmt: skip
    assert found["NCCL, 2 GPUs", "FSDP"][:4] == ["4", "0%", "+6%", "+20%"]
    # 1.5 and 4 ms in 5, or 6 and 4 in 8: nearest at 3 and 4 in 5.
    assert found["NCCL, 2 GPUs", "tensor parallel"][4:] == [
        "67%", "backward, 1,000 tokens, d_ff 250",
    ]  # fmt: skip
    assert answer.rate(Layer(1, 1, 1, 48.7e9, 1)) == "48.7 GFLOP/s"


def test_why_times_are_off_adds_up(made):
    p = made([*BY_BATCH, *BY_WIDTH])
    found = lines(why.parts(p, "c", "tab-c"), 3)
    assert found["NCCL, 2 GPUs", "data parallel", "messages"] == ["1", "0%", "0%", "0%", "0%"]
    # 33 ms for 30, and neither was slower alone.
    assert found["NCCL, 2 GPUs", "data parallel", "products"] == ["1", "+10%", "0%", "0%", "+10%"]
    # Forward 18 ms for 15. Backward 30 for 30, though half the messages would make it 27.
    assert found["NCCL, 2 GPUs", "FSDP", "products"] == ["2", "+10%", "0%", "−5%", "+15%"]
    # Of two layers of 12 ms of products, which took 48 ms alone: 48 and the last 6 of messages.
    slow = [row("dp", "backward", 2000, 57, 24, 12), row("dp", "backward", 1000, 57, 48, 12)]
    table = made(slow).table.set_index("tokens")
    assert table.loc[1000, ["clock", "by_products", "by_messages", "by_both"]].tolist() == (
        pytest.approx([18, 2, 0, 57 / 18 - 3])
    )
    sums = p.table["by_products"] + p.table["by_messages"] + p.table["by_both"]
    assert sums.tolist() == pytest.approx(p.table["off"].tolist())
    theirs = [*BY_BATCH, row("dp", "end_to_end", 500, 27, "", implementation="torch")]
    assert math.isnan(made(theirs).table.iloc[-1]["by_both"])


def test_why_in_words(made, empty):
    ceiling = [{"operation": "copy", "dtype": "fp32", "size": 10**9, "ms": 200, "n": 9}]
    more = [row("dp", "backward", 4000, 66, 60, 12)]
    calls = [{**collective(GIB), "operation": call, "ms": ms} for call, ms in
             (("all_reduce", 4), ("all_gather", 2), ("reduce_scatter", 4))]  # fmt: skip
    sums = [*sent()[:-1], *calls]
    p = made([*BY_BATCH, *BY_WIDTH, *more], collectives=sums, ceiling=ceiling)
    # 12 ms of messages beside 24, 6 beside 12: near. 12 beside 60, 6 beside 3 on the line, 5 not.
    said = str(why.told(p, "nccl"))
    assert "alone reach 100% of C at 500 tokens and 80% of C at 4,000 tokens." in said
    assert "; the most is +20% (FSDP, forward, 2,000 tokens, d_ff 1,000)." in said
    assert str(why.told(p, "gloo")) == ""
    # 1 GiB in 4 ms, half of it on the wire of a gather.
    said = str(why.messages(p))
    assert "reaches 268 GB/s in all-reduces, 268 GB/s in gathers and 134 GB/s in scatters" in said
    # Two layers in two halves of 1 MB: 20 us and 5 us each.
    assert "The 4 sums of tensor parallelism's forward at 1,000 tokens have 1.00 MB each." in said
    assert "By bytes alone they take 4.00 ms" in said and "they took 4.00 ms" in said
    # 10 bytes at 0.01 TB/s against 6,000 operations at 1 TFLOP/s; 22 against 12,000.
    said = str(why.elementwise(p))
    assert "at 0.01 TB/s, what a copy reaches, are 17% forward and 18% backward" in said
    for say in (why.messages, why.elementwise):
        assert str(say(empty)) == ""


def test_c_w_and_every_time_in_tables(made):
    found = lines(answer.inputs(made([*BY_BATCH, *BY_WIDTH]), "c", "tab-c"), 1)
    # FSDP's backward sends its 12 MB in 6 ms at the largest batch.
    assert found == {("NCCL, 2 GPUs",): [
        "bf16", "1.00 TFLOP/s", "0%", "1.00 GB/s", "2.00 GB/s", "1.00 GB/s", "1,000"]}  # fmt: skip
    table = compared.times(made(BY_BATCH), made(BY_BATCH).machines[0], "c", "tab-c")
    found = lines(table, 4)
    assert found["data parallel", "1,000", "2,000", "backward"] == [
        "24.0", "24.0", "12.0", "12.0", "30.0", "33.0", "+10%", "products / products",
    ]  # fmt: skip
    assert found["data parallel", "1,000", "500", "forward"][2:4] == ["0", "·"]


def test_pytorchs_beside_ours(made):
    theirs = [row("dp", "end_to_end", 500, 27, "", implementation="torch"),
              row("dp", "end_to_end", 2000, 42.5, "", implementation="torch")]  # fmt: skip
    found = lines(compared.peers(made([*BY_BATCH, *theirs]), "c", "tab-c"), 3)
    assert found == {
        ("NCCL, 2 GPUs", "data parallel", "500"): ["18.0", "27.0", "1.50", "one run"],
        ("NCCL, 2 GPUs", "data parallel", "2,000"): ["42.0", "42.5", "**1.01**", "one run"],
    }
    assert str(compared.all_peers(made([*BY_BATCH, *theirs]), "c", "tab-c")).startswith(
        "PyTorch's take with NCCL, 2 GPUs: 1.01 to 1.50 under data parallel times the time of "
        "ours, 1.25 in the middle of 2. With 4 times the smallest batch's tokens ours and "
        "PyTorch's take 2.33 and 1.57 times as long (data parallel, NCCL, 2 GPUs). What does not "
    )


def test_which_rows_are_of_another_run_is_said(made, empty):
    theirs = [row("dp", "end_to_end", n, 27, "", implementation="torch") for n in (500, 2000)]
    p = made([*BY_BATCH, *theirs])
    main = p.table["run"].iloc[0]
    assert str(overlap.runs(p)).startswith(
        f"NCCL, 2 GPUs: ours are of the run `{main}`, and so are PyTorch's. Another run may"
    )
    assert "of two runs" not in str(compared.all_peers(p, "c", "tab-c"))
    other = made(BY_WIDTH, device="cpu").local["run"].iloc[0]
    theirs[0]["run"] = other
    p = made([*BY_BATCH, *theirs])
    said = str(overlap.runs(p))
    assert f"ours are of the run `{main}`, 1 of PyTorch's 2 of `{other}`." in said
    found = lines(compared.peers(p, "c", "tab-c"), 3)
    assert [cells[-1] for cells in found.values()] == ["two", "one run"]
    assert "In 1 of the 2 pairs ours and PyTorch's are of two runs, perhaps on two" in str(
        compared.all_peers(p, "c", "tab-c")
    )
    mixed = [{**one, "run": other} for one in BY_BATCH[:2]]
    said = str(overlap.runs(made([*mixed, *BY_BATCH[2:]])))
    assert f"of the run `{main}`, but 2 of 10 of `{other}`." in said
    assert str(overlap.runs(empty)) == ""


def test_how_much_runs_at_once_in_words(made):
    on = {"conditions": "A processor, 2 cores"}
    # 15 ms of 6 and 12, 33 of 24 and 12; FSDP's 13.5 of 6 and 12, 30 of 24 and 6.
    gloo = [{**one, **on, "backend": "gloo"} for one in BY_BATCH]
    said = str(why.told(made(gloo), "gloo"))
    assert "in the middle of the batches: 38% under data parallelism and 38% under FSDP." in said
    assert said.endswith(
        "gloo's processes ran on A processor, 2 cores, each with its share for threads."
    )
    assert "one after the other" not in said
    # 2 messages of 6 MB, of 40 us and 60 us each from rest, and 12 ms here.
    sums = [{**one, "backend": "gloo", **on} for one in sent()]
    said = str(why.told(made(gloo, collectives=sums), "gloo"))
    assert (
        "To W's 2 messages of 6.00 MB the line fitted to [all-reduces by themselves]"
        "(collectives.md), of other runs on A processor, 2 cores, gives 0.200 ms one after the "
        "other; here, all started at once, they took 12.0 ms."
    ) in said
    # 20 and 38 ms are 2 more than one after the other.
    slow = [{**one, "ms_p80": one["ms"] + 5, "ms": one["ms"] + 5} for one in gloo[2:4]]
    said = str(why.told(made(slow), "gloo"))
    assert "nothing under data parallelism. Under data parallelism both at once take longer" in said
    said = lines(compared.near(made(slow), "c", "tab-c"), 2)
    assert said["gloo, 2 processes", "data parallel"][4].startswith("−")


def test_the_figures_hold_the_points_and_the_formula(made, empty):
    p = made([*BY_BATCH, *BY_WIDTH])
    first, second = drawn.by_batch(p, "nccl").figure.axes
    assert first.get_title() == "data parallel\nNCCL, 2 GPUs" and second.get_title()[:4] == "FSDP"
    together, products, messages, formula, threshold = first.lines
    assert list(together.get_xdata()) == [500, 2000] and list(together.get_ydata()) == [15, 33]
    assert list(products.get_ydata()) == [6, 24] and list(messages.get_ydata()) == [12, 12]
    assert list(formula.get_xdata()) == pytest.approx([500, 1000, 2000])
    assert list(formula.get_ydata()) == pytest.approx([12, 12, 24])
    assert threshold.get_xdata()[0] == pytest.approx(1000)
    # Of the width no threshold is drawn along the batch.
    more = [row("tp", "backward", 2000, 28, 24, 8)]
    third = drawn.by_batch(made([*BY_BATCH, *BY_WIDTH, *more]), "nccl").figure.axes[2]
    assert third.get_title()[:6] == "tensor" and len(third.lines) == 4
    (wide,) = drawn.by_width(p).figure.axes
    assert list(wide.lines[0].get_xdata()) == [250, 1000]
    assert wide.lines[-1].get_xdata()[0] == pytest.approx(1000 / 3)
    for chart in (drawn.by_batch(p, "nccl"), drawn.by_width(p), drawn.by_batch(empty, "gloo")):
        assert svg.smallest_text(chart._repr_svg_()) >= svg.LEAST_SIZE


def test_each_number_of_ranks_begins_a_row_of_panels():
    assert drawn._places(list("aaabbbbcd")) == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (5, 0),
    ]  # fmt: skip


def test_the_page_without_rows(shown_by, tmp_path):
    without = shown_by("parallelism-measured", tmp_path)
    assert sum("Not measured yet" in text for text in without) >= 5


def test_rows_that_lack_something_are_no_crash(shown_by, synthetic, tmp_path):
    """A sweep cut off at once, failed rows alone, one batch alone."""
    blank = dict.fromkeys(("ms", "ms_p20", "ms_p80", "n"), "")
    failed = row("dp", "backward", 2000, 1, "", status="error") | blank
    for some in ([failed], BY_BATCH[:1], [BY_BATCH[2]], BY_WIDTH, [BY_BATCH[2], failed]):
        data = synthetic.by_hand(tmp_path, parallelism=some)
        shown_by("parallelism-measured", data)


def test_another_machine_is_shown_with_all_its_rows(made):
    said = str(local.show(made([*BY_BATCH, *BY_WIDTH], device="cpu")))
    assert "**CPU**\n" in said and "tiny" not in said
    assert said.count("| ours |") == len(BY_BATCH) + len(BY_WIDTH)
    assert "| 33.0 | 24.0 | 12.0 | 30.0 |" in said
