"""What the chapter on checkpointing says, by value: rows made by hand, in round milliseconds."""

import math

import pytest
import sympy

from a2lib.report import svg
from a2lib.report.chapters.checkpointing import (
    Checkpointing,
    answer,
    checks,
    least,
    local,
    segments,
)
from a2lib.report.chapters.checkpointing.rows import (
    NARROW,
    STRATEGIES,
    WIDE,
    held,
    ms_predicted,
    predicted,
    runs,
    work,
)
from a2lib.theory.checkpointing import best_segment, textbook_segment
from a2lib.theory.strategy_memory import block_bytes
from a2lib.theory.transformer import SIZES


def row(strategy, ms, gradients="fresh", way=WIDE, layers=32, off=1.0, **over):
    """Measured as predicted, times ``off``."""
    peak = int(predicted(strategy, gradients, way, layers).peak * off)
    stays = held(gradients, layers)
    return {
        "model": "2.7B", "layers": layers, "context": 2048, "batch": 4, "precision": way[0],
        "attention": way[1], "strategy": strategy, "gradients": gradients, "ms": ms, "n": 3,
        "ms_forward": 300, "ms_backward": ms * 0.7, "held_bytes": stays, "kept_bytes": 10**9,
        "peak_bytes": peak, "reserved_bytes": int((stays + peak) * 1.02), **over,
    }  # fmt: skip


def refused(strategy, gradients="fresh"):
    blank = ("ms", "n", "ms_forward", "ms_backward", "held_bytes", "kept_bytes", "peak_bytes")
    blank = dict.fromkeys((*blank, "reserved_bytes"), "")
    return row(strategy, 1, gradients) | blank | {"status": "oom", "note": "out of memory"}


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows, device="nvidia-h200"):
        # A copy at 4 TB/s.
        ceiling = [{"operation": "copy", "dtype": "bf16", "size": 2 * 10**9, "ms": 1}]
        sections = {"checkpointing": rows, "ceiling": ceiling}
        return Checkpointing([synthetic.by_hand(tmp_path, device=device, **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Checkpointing([tmp_path])


def lines(table, keys=1):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_the_prediction(empty):
    said = str(answer.sentence(empty))
    # 12 bytes for each of 3.4068e9 parameters.
    assert "(b) One block. At batch 4" in said and ", 40.9 GB of it weights" in said
    # 4 * 8192 * 2560 bytes; 10 u + 4 g + s + 2 rows in fp32 and the mask.
    assert "saves inputs of 0.0839 GB and costs the 4.33 GB" in said
    # 31 blocks' gradients, one block with its own, the head's: 63.5 = 40.9 + 13.0 + 9.5 + 0.1.
    assert "a step of 2.7B then peaks at 63.5 GB by prediction" in said
    first, second = said.split("\n\n")
    assert first.endswith("**Not measured yet on an NVIDIA H200**: the peaks and the times.")
    assert "for 16.1 forwards more at 32 blocks" in second
    assert "the depth, for 2.75 forwards more." in second
    assert second.endswith("**Not measured yet on an NVIDIA H200**: the first input alone.")
    assert answer.best("kept") == answer.best("fresh", NARROW) == "block"


def test_the_answer_with_rows(made):
    def best(rows):
        return str(answer.sentence(made(rows))).partition("\n\n")[0]

    rows = [row("half", 1500), row("block", 1530), row("segments:2", 1600), refused("none")]
    said = best(rows)
    assert "in TF32: 63.5 GB and 1500 ms (half a block), 63.5 GB and 1530 ms (1 block) " in said
    assert said.endswith("67.4 GB and 1600 ms (2 blocks); the least of the 3 tried so far is 1 "
                         "block, as predicted.")  # fmt: skip
    rows[2] = row("segments:2", 1600, off=0.5)
    assert best(rows).endswith("is 2 blocks, not as predicted.")
    rows += [row(f"segments:{k}", 1600) for k in (4, 8, 16)]
    assert "the least of all single-level segments is" in best(rows)
    for gradients, ms in (("fresh", 500), ("kept", 400)):
        rows += [row(s, ms * i, gradients, NARROW) for i, s in ((1, "block"), (5, "chain"))]
    assert str(answer.sentence(made(rows))).endswith(
        "Measured in bf16, FlashAttention, beside one block at a time and beyond what stays: 2.05 "
        "in place of 4.56 GB with kept gradients at 5.00 times the time and the same 15.2 GB "
        "with fresh gradients at 5.00 times the time."
    )
    rows += [row("chain", 100, "kept", NARROW, layers) for layers in (8, 16)]
    said = str(answer.sentence(made(rows)))
    assert said.endswith("The 2.05 GB are the same at 8, 16 and 32 blocks.")
    rows[-1] = row("chain", 100, "kept", NARROW, 16, off=1.1)
    assert str(answer.sentence(made(rows))).endswith("5.00 times the time.")


def test_the_table_has_predicted_and_measured(made):
    c = made([row("block", 1500), row("segments:2", 1534, off=1.1), refused("none"),
              row("block", 1510, "kept")])  # fmt: skip
    found = lines(segments.table(c, WIDE, "c", "tab-c"))
    assert len(found) == len(STRATEGIES[WIDE])
    assert found[("no checkpoint",)][:2] == ["144", "oom"]
    assert found[("1 block",)] == ["22.6", "22.6", "11.8", "11.8"]
    assert found[("2 blocks",)] == ["26.5", "29.2", "14.8", "·"]  # 26.54 GB times 1.1
    found = lines(segments.times(c, "c", "tab-c"))
    assert found[("1 block",)] == ["0.767", "1500", "1500", "·", "·"]
    # Of 300 ms a forward's 865 GB take 216 and its 55.4 TFLOP the rest: 16 products of 0.429 TFLOP
    # with the sum behind each, of 0.25 GB, are 11.4 ms.
    assert found[("2 blocks",)] == ["0.880", "1511", "1534", "·", "·"]
    assert found[("first input alone",)] == ["16.1", "·", "·", "·", "·"]
    assert not lines(segments.table(c, NARROW, "c", "tab-c"))[("1 block",)][1].strip("·")


def test_the_neighbours_by_setting(made):
    rows = [row("half", 1450), row("block", 1500), row("segments:2", 1600)]
    rows += [row(s, ms, "kept") for s, ms in (("half", 1500), ("block", 1500), ("segments:2", 1))]
    assert str(segments.neighbours(made(rows))) == (
        "- fp32, eager attention, gradients fresh: 1 block at 22.6 GB, as predicted, then 2 "
        "blocks at 26.5 GB; half a block the same to 1%, and its step takes 3.3% less time.\n"
        "- fp32, eager attention, gradients kept: 1 block at 11.8 GB, as predicted, then 2 "
        "blocks at 14.8 GB; half a block 2.60 GB more, and its step takes as long."
    )


def test_the_check_by_value(made, empty):
    rows = [row("block", 1500, off=1.01), row("segments:2", 1511, off=0.98),
            row("selective:linear", 1500, off=1.2, ms_forward=330), refused("none")]  # fmt: skip
    c = made(rows)
    late = 1500 / ms_predicted(c, "selective:linear", "fresh", WIDE) - 1
    assert late > 0.03
    said = str(checks.checked(c))
    far = predicted("selective:linear", "fresh").peak / 5 / 2**30
    assert said.startswith(
        f"Of 3 measured peaks the farthest from its prediction is 20.00% off ({far:.2f} GiB). "
        "Peaks off by more than 3%: linear layers kept (tf32, eager, fresh) +20.0%. The time of a "
        f"step is 0.0% to +{late:.1%} off the predicted one, within 1% in 1 of 2. Times off by "
        "more than 3%, "
    )
    assert (
        f"is off that of 1 block: linear layers kept (tf32, eager, fresh) +{late:.1%} (+10.0%). "
    ) in said
    near = str(checks.checked(made([*rows[:2], row("half", 1486)])))
    assert "off by more" not in near and "2.00% off" in near
    assert "Not measured yet" in str(checks.checked(empty))
    assert "held 2.0% more" in str(checks.fragments(made(rows)))


def test_what_is_repeated_by_value(made, empty):
    rows = [row("block", 1500), row("segments:16", 1530), row("selective:linear", 1425)]
    said = str(checks.repeated(made(rows)))
    assert "segments of 16 blocks take 2.0% longer than 1 block" in said
    # 30 products of 0.429 TFLOP at the rate of the rest of the forward, and sums: 21.3 ms.
    assert "one product a block, 21.3 of 1530 ms by the prediction" in said
    assert "0.09 forwards by operations, but 0.71 by time" in said
    assert said.endswith("that step is 5.0% shorter than 1 block's and its peak 2.0 times as high.")
    assert "Not measured yet" in str(checks.repeated(empty))
    kept = made([row("block", 1500), row("block", 1530, "kept"), row("half", 1500, "kept")])
    assert str(checks.kept_times(kept)).endswith("a step takes 2.0% longer.")
    assert "Not measured yet" in str(checks.kept_times(empty))


def test_the_formulas_in_numbers(empty):
    found = lines(segments.units("c", "tab-c"))
    assert found["fp32, eager attention",] == ["0.0839", "4.33", "0.419", "9.18", "9.52"]
    assert str(segments.example(empty)) == (
        "One block at a time in fp32, eager attention: with kept gradients $31 \\, I + M$ = 2.60 + "
        "9.18 = 11.8 GB and with fresh gradients $31 \\, G + M + 0.102$ = 13.0 + 9.52 + 0.102 = "
        "22.6 GB, of which the last term is the gradient of the head."
    )


def test_what_has_no_figure_has_its_reason(made, empty):
    whole = [row(s, 1, g, way) for way, found in STRATEGIES.items() for s in found
             for g in ("fresh", "kept")]  # fmt: skip
    assert str(segments.refused(made(whole))) == "Everything that was tried has its figures."
    whole = [r for r in whole if (r["strategy"], r["gradients"], r["precision"])
             != ("none", "kept", "tf32")]  # fmt: skip
    c = made([refused("none"), *(r for r in whole if r["strategy"] not in ("none", "chain"))])
    assert str(segments.refused(c)) == (
        "- fp32, eager attention, gradients fresh, no checkpoint: out of memory\n"
        "- fp32, eager attention, gradients kept, no checkpoint: not tried, since more stays\n"
        "- **not measured yet**: bf16, FlashAttention, gradients fresh: no checkpoint and first "
        "input alone\n"
        "- **not measured yet**: bf16, FlashAttention, gradients kept: no checkpoint and first "
        "input alone"
    )
    assert "Not measured yet" in str(segments.refused(empty))
    found = lines(segments.times(c, "c", "tab-c"))
    assert found[("no checkpoint",)][2] == "oom" and found[("no checkpoint",)][4] == "·"


def test_without_tf32(made, empty):
    fp32 = ("fp32", "eager")
    c = made([row("block", 1500), row("block", 6000, way=fp32), row("half", 1, way=fp32)])
    assert str(checks.precise(c)) == (
        "Without TF32 a step takes 4.00 times as long: 6000 ms in place of 1500 (1 block). The "
        "peaks are the same."
    )
    peak = int(c.timed("block").peak_bytes) - 2**20
    c = made([row("block", 1500), row("block", 6000, way=fp32, peak_bytes=peak)])
    assert str(checks.precise(c)).endswith("The peaks differ by 1.00 MiB at most.")
    assert "Not measured yet" in str(checks.precise(empty))


def test_what_stays_and_what_does_not_fit(empty):
    assert str(segments.held_bytes(empty)) == (
        "The peaks are beyond what stays between steps: 40.9 GB of weights and moments, with kept "
        "gradients 54.5 GB. Of the 141 GB of an H200 that leaves too little for no checkpoint in "
        "the first setting."
    )


def test_what_stays_as_measured(made):
    rows = [row("block", 1500, held_bytes=int(1.01 * held("fresh"))), row("half", 1, "kept")]
    said = str(segments.held_bytes(made(rows)))
    assert "Measured they are 0.0% to 1.0% more, what the allocator gives beyond" in said


def test_the_highest_moment_is_bold(empty):
    found = lines(segments.moments("c", "tab-c"), 3)
    assert found["fp32, eager attention", "attention", "softmax"] == ["**9.18**"]
    assert found["bf16, FlashAttention", "FFN", "gate times value"] == ["**1.96**"]
    assert sum("**" in cell for (cell,) in found.values()) == 2


def test_the_least_by_depth(made, empty):
    rows = [row(s, 500 + 100 * i, "kept", NARROW, layers)
            for layers in (8, 16, 32) for i, s in enumerate(least.strategies(layers))]  # fmt: skip
    c = made(rows)
    found = lines(least.table(c, "c", "tab-c"), 2)
    assert found["8", "1 block"] == ["7", "1.00", "2.55", "2.55", "500"]
    assert found["32", "first input alone"][:4] == ["1", "16.5", "2.05", "2.05"]
    assert found["128", "halves of halves"] == ["7", "4.00", "2.55", "·", "·"]
    assert str(least.sentence(c)).endswith(
        "Measured it is 1.76 GB lower at 1.20 times the time (two levels of 4), 2.18 GB lower at "
        "1.40 times the time (halves of halves) and 2.52 GB lower at 1.60 times the time (first "
        "input alone)."
    )
    assert str(least.constant(c)) == (
        "With the first input alone the measured peak is the same at 8, 16 and 32 blocks, 2.05 GB, "
        "and a step takes 1.60, 1.60 and 1.60 times as long as with one block at a time."
    )
    lacks = "**Not measured yet on an NVIDIA H200**: the strategies of least memory at "
    assert str(least.constant(made(rows[8:]))) == lacks + "8 and 16 blocks."
    some = str(least.constant(made(rows[4:])))
    assert "the same at 16 and 32 blocks" in some and some.endswith(lacks + "8 blocks.")
    rows[3] = row("chain", 1, "kept", NARROW, 8, off=2)
    assert "is not the same at" in str(least.constant(made(rows)))
    assert "strategies gain nothing by the prediction" in str(least.fresh(empty))
    fresh = [row(s, 1, "fresh", NARROW) for s in least.strategies(32)]
    assert str(least.fresh(made(fresh))).endswith("Measured: 15.2 GB.")
    assert str(least.constant(empty)).startswith("**Not measured yet")


def test_the_figure_has_a_point_for_each(made, empty):
    for c, measured in ((empty, 0), (made([row("block", 1000), row("none", 900)]), 2)):
        drawn = answer.frontier(c)
        panels = drawn.figure.axes
        points = [[line for line in ax.lines if line.get_marker() not in ("", "None")]
                  for ax in panels]  # fmt: skip
        ways = (WIDE, WIDE, NARROW, NARROW)
        for i, (mine, way) in enumerate(zip(points, ways, strict=True)):
            assert len(mine) == len(STRATEGIES[way]) + (measured if i == 0 else 0)
        picture = drawn._repr_svg_()
        assert svg.smallest_text(picture) >= svg.LEAST_SIZE
    filled = [line for line in points[0] if line.get_fillstyle() == "full"]
    assert sorted(float(line.get_xdata()[0]) for line in filled) == [0.9, 1.0]
    assert work("block") == 1 > work("half") > work("none")


def test_on_your_machine(made, empty):
    text = str(local.show(made([row("block", 1500)], device="nvidia-h100")))
    assert "2.7B, 32 blocks" in text and "1500" in text and "22.6" in text
    assert "sweep all" in str(local.show(empty))


def test_the_page_with_and_without_rows(made, shown_by, tmp_path, synthetic):
    bare = " ".join(shown_by("checkpointing", tmp_path / "none"))
    assert bare.count("Not measured yet") >= 6 and "nan" not in bare
    rows = [row(s, 1000 + i, g, way) for way in (WIDE, NARROW) for g in ("fresh", "kept")
            for i, s in enumerate(STRATEGIES[way])]  # fmt: skip
    rows += [row(s, 500, "kept", NARROW, n) for n in (8, 16) for s in least.strategies(n)]
    rows += [row("block", 6000, way=("fp32", "eager"))]
    ceiling = [{"operation": "copy", "dtype": "bf16", "size": 2 * 10**9, "ms": 1}]
    folder = synthetic.by_hand(tmp_path / "full", checkpointing=rows, ceiling=ceiling)
    full = " ".join(shown_by("checkpointing", folder))
    assert "Not measured yet" not in full and "nan" not in full


def test_the_equations_of_the_page():
    """eq-ckpt-kept to eq-ckpt-work by sympy, and their numbers by what the library computes."""
    N, k, j, n = sympy.symbols("N k j n", positive=True)
    I_, A, M, G = sympy.symbols("I A M G", positive=True)
    kept = (N / k - 1) * I_ + (k - 1) * A + M
    [best] = sympy.solve(sympy.diff(kept, k), k)
    assert sympy.simplify(best - sympy.sqrt(N * I_ / A)) == 0
    assert sympy.diff(kept, k, 2).is_positive
    assert sympy.simplify(kept.subs(k, 2) - kept.subs(k, 1) - (A - N * I_ / 2)) == 0
    after = (N / k - 1 - j) * I_ + j * k * G + (k - 1) * A + M
    assert sympy.simplify(after.subs(j, 0) - kept) == 0
    assert sympy.diff(after, j) == G * k - I_
    fresh = sympy.expand((N - k) * G + (k - 1) * A + M)
    assert sympy.simplify(after.subs(j, N / k - 1) - fresh) == 0
    assert sympy.diff(fresh, k) == A - G
    assert sympy.summation(j, (j, 1, N)) == sympy.expand(N * (N + 1) / 2)
    # R(n) = n / 2 + 2 R(n / 2), R(1) = 1, by powers of two; the outermost halves run alone.
    R = n + n / 2 * sympy.log(n, 2)
    assert sympy.simplify(R - n / 2 - 2 * R.subs(n, n / 2)) == 0 and R.subs(n, 1) == 1
    outer = sympy.expand_log(2 * R.subs(n, N / 2) / N, force=True)
    assert sympy.simplify(outer - 1 - (sympy.log(N, 2) - 1) / 2) == 0
    for layers in (8, 32):
        assert runs("recursive", layers) == 1 + (math.log2(layers) - 1) / 2
        assert runs("chain", layers) == (layers + 1) / 2
        assert runs("nested:4", layers) == 1 + 3 / 4
    for way, precision in ((WIDE, "fp32"), (NARROW, "bf16")):
        for is_fresh, formula in ((False, kept), (True, fresh)):
            b, _ = block_bytes(SIZES["2.7B"], 4, 2048, way[1], precision, fresh=is_fresh)
            given = {N: 32, I_: b.input, A: b.saved, M: b.peak, G: b.gradients}
            peaks = {size: formula.subs(given).subs(k, size) for size in (1, 2, 4, 8, 16, 32)}
            assert min(peaks, key=peaks.get) == 1
            assert best_segment(32, b, fresh_gradients=is_fresh) == 1
            # Beside the loss and its gradient.
            head = 8 + (4 * 10_001 * 2560 if is_fresh else 0)
            for size in (2, 4):
                gradients = "fresh" if is_fresh else "kept"
                assert predicted(f"segments:{size}", gradients, way).peak == peaks[size] + head
        assert sympy.N(best.subs(given)) == pytest.approx(textbook_segment(32, b))
