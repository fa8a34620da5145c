"""What the chapter on torch.compile says of attention, by value: rows made by hand."""

import math
import re

import pytest
from benchmark_rows import CEILING
from compile_rows import GRID, STEPS, both, shape, step

from a2lib.report.chapters.compile import (
    Compile,
    answer,
    cost,
    local,
    models,
    published,
    reasons,
    rows,
)
from a2lib.report.chapters.measured import SHARED
from a2lib.report.tables import MISSING
from a2lib.theory.compiling import attention_kernels


@pytest.fixture
def chapter(synthetic, tmp_path):
    def make(**sections):
        return Compile([synthetic.by_hand(tmp_path, **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Compile([tmp_path])


def test_the_answer_word_for_word(chapter):
    c = chapter(compile_attention=GRID, compile_model=STEPS)
    assert str(answer.sentence(c)) == (
        "**The answer.** On an NVIDIA H200 compiled attention (fp32, heads of 64, batch 8, without "
        "a mask) is 2.00 times as fast forward and 3.00 times as fast backward at 16,384 "
        "tokens, and ahead from 4,096 tokens on, forward and backward.\n\nA train-step (fp32, "
        "512 tokens) of the small model takes 100 ms eager and 50.0 ms compiled as one graph, 2.00 "
        "times as fast. In fp32 compiling takes 20 s as one graph."
    )


def test_until_the_grid_is_there_the_answer_is_of_the_flash_rows(chapter, one_head):
    made = [one_head(i, p, ms, dtype="fp32", head_dim=64, seq_len=n)
            for n, t in ((1024, 3), (2048, 1)) for i, ms in (("eager", 2), ("compile", t))
            for p in ("forward", "backward")]  # fmt: skip
    assert str(answer.sentence(chapter(flash=made))) == (
        "**The answer.** On an NVIDIA H200 compiled attention (fp32, heads of 64, batch 1, causal) "
        "is 2.00 times as fast forward and 2.00 times as fast backward at 2,048 tokens, and "
        "ahead from 2,048 tokens on, forward and backward.\n\n**Not measured yet on an NVIDIA "
        "H200**: the grid of the handout, batch 8 without heads, and whole models."
    )


def test_it_pays_from_where_no_longer_length_ties_or_loses(chapter):
    def start(*gains, low=None):
        made = [row for n, gain in zip((256, 1024, 4096), gains, strict=True)
                for row in both(n, (gain, 1), (1, 1))]  # fmt: skip
        if low:
            made[8] |= {"ms_p20": low}
        line = rows.curve(rows.pairs(chapter(compile_attention=made).grid), "plain", "fp32", 64,
                          "forward")  # fmt: skip
        return rows.pays_from(line)

    assert start(2, 2, 2) == 256 and start(2, 0.5, 2) == 4096
    assert start(2, 2, 1.01) is None and start(0.5, 2, 2) == 1024
    assert start(2, 2, 2, low=0.9) is None  # its range reaches the compiled time


def test_slower_is_not_called_faster(chapter):
    c = chapter(compile_attention=both(16384, (1, 1), (2, 4)),
                compile_model=step("none", 30, 60) + step("blocks", 60, 130))  # fmt: skip
    assert str(answer.sentence(c)).endswith(
        "0.50 times as fast forward and 0.25 times as fast backward at 16,384 tokens, and ahead at "
        "no length.\n\nA train-step (fp32, 512 tokens) of the small model takes 100 ms eager and "
        "200 ms compiled block by block, 2.00 times as long."
    )


def test_the_grids_table_and_what_it_leaves_out(chapter):
    oom = {"status": "oom", "ms": "", "ms_p20": "", "ms_p80": "", "n": "", "note": "out of memory"}
    made = [*both(256, (1, 2), (2, 1), d=16, gpu=3), shape("eager", "forward", 1, 16384, 128) | oom]
    made += [shape("compile", "forward", 1, 16384, 128)]
    c = chapter(compile_attention=made)
    frame = answer.table(c, "plain", "fp32", "c", "tab-c").frame
    assert frame.astype(str).values.tolist() == [
        ["16", "256", "1.00", "2.00", "0.50", "1.00", "2.00", "1.00", "2.00", "1.00"]
    ]
    assert not len(answer.table(c, "causal", "fp32", "c", "tab-c").frame)
    said, left = str(answer.untimed(c)).split("\n\n")
    assert said == "- eager, plain, fp32, 16,384 tokens, heads of 128, forward: oom (out of memory)"
    assert left == (
        "**Not measured yet, or not whole**, of the question's grid: 256 tokens with heads of 32, "
        "64 and 128; 1,024 tokens; 4,096 tokens; 8,192 tokens; 16,384 tokens."
    )
    assert str(answer.untimed(chapter(compile_attention=GRID))).startswith("Every shape")
    every = [{**row, "seq_len": n, "head_dim": d} for n in rows.LENGTHS for d in rows.HEAD_DIMS
             for row in both(n, (1, 1), (1, 1))]  # fmt: skip
    said = str(answer.untimed(chapter(compile_attention=every[:-1])))
    assert said.endswith("of the question's grid: 16,384 tokens with heads of 128.")
    assert "Not measured" not in str(answer.untimed(chapter(compile_attention=every)))


DERIVED = (
    "What has to happen there without a time is derived and tested above: which of them Inductor "
    "recognises, the kernels and the matrices."
)


def test_the_other_ways_to_write_it_by_value(chapter):
    heads = [{**row, "written": "heads"} for row in both(16384, (100, 300), (25, 100))]
    short = [{**row, "dtype": "bf16"} for row in both(4096, (10, 20), (20, 10))]
    said, *tables = str(
        answer.other_ways(chapter(compile_attention=[*GRID, *heads, *short]))
    ).split("\n\n:::{table} ")
    assert said == (
        "Compiled, with heads of 64: with a dimension of one head it is 4.00 times as fast forward "
        "and 3.00 times as fast backward at 16,384 tokens; in bf16 it is 0.50 times as fast "
        "forward and 2.00 times as fast backward at 4,096 tokens. **Not measured yet on an NVIDIA "
        f"H200**: attention of batch 8 with a mask. {DERIVED}"
    )
    assert [t.partition(":")[0] for t in tables] == [
        "Attention with a dimension of one head, fp32", "Attention in bf16",
    ]  # fmt: skip
    causal = [{**row, "written": "causal"} for row in both(16384, (100, 300), (25, 100))]
    whole = str(answer.other_ways(chapter(compile_attention=[*GRID, *heads, *short, *causal])))
    assert "Not measured" not in whole and "with a mask it is 4.00 times as fast forward" in whole


def test_a_mask_is_told_by_the_flash_rows_until_it_is_measured(chapter, one_head):
    where = {"dtype": "fp32", "head_dim": 64, "seq_len": 2048}
    flash = [one_head(i, p, ms, **where) for i, ms in (("eager", 3), ("compile", 2))
             for p in ("forward", "backward")]  # fmt: skip
    assert str(answer.other_ways(chapter(compile_attention=GRID, flash=flash))) == (
        "Compiled, with heads of 64: with a mask, as the [chapter on FlashAttention](flash.md) has "
        "it for batch 1, it is 1.50 times as fast forward and 1.50 times as fast backward at 2,048 "
        "tokens. **Not measured yet on an NVIDIA H200**: attention of batch 8 with a mask, with a "
        f"dimension of one head and in bf16. {DERIVED}"
    )


def test_whose_time_it_is(chapter):
    made = both(256, (1, 2), (2, 1), host=0.1) + both(1024, (2, 2), (1, 1))
    made += both(4096, (1, 2), (2, 1))
    for row in made:
        eager = row["implementation"] == "eager"
        row["ms_graph"], row["ms_host"] = (2, 0.1) if eager else (1, 0.2)
    made[5]["ms_graph"] = made[8]["ms_graph"] = 0.5
    made += [{**row, "head_dim": 16, "ms_host": 3 * row["ms_host"]} for row in made[:4]]
    assert str(answer.regimes(chapter(compile_attention=made))) == (
        "On the GPU alone compiled is ahead of eager in 6 of 8 passes. As called it is behind in "
        "3, in 2 of which the GPU alone would be ahead: there the host's time decides, up to 256 "
        "tokens. To issue a compiled call takes the host 200 to 600 µs forward where eager takes "
        "100 to 300 µs and 200 to 600 µs backward where eager takes 100 to 300 µs, by head size at "
        "the shortest length, where the launches are the same: so far does the host's time scatter."
    )
    c = chapter(compile_attention=made)
    c.grid["run"] = SHARED[0] + "-nvidia-h200-000000"
    assert str(answer.regimes(c)).endswith("while the other GPU ran another sweep.")


def test_the_figure_has_a_line_for_each_head_size_and_clock(chapter):
    drawn = answer.chart(chapter(compile_attention=GRID))
    axes = drawn.figure.axes
    assert [ax.get_title() for ax in axes] == ["forward", "backward"]
    gains = [list(line.get_ydata()) for line in axes[1].lines if len(line.get_ydata()) == 3]
    assert gains[0] == [1, 20 / 19, 3]


def test_kernels_and_matrices_as_derived_and_as_measured(chapter):
    made = [*GRID, shape("eager", "backward", 1, 256, launches=7),
            shape("compile", "backward", 1, 256, launches=6, library_calls=5)]  # fmt: skip
    frame = reasons.counts(chapter(compile_attention=made), "c", "tab-c").frame.astype(str)
    assert frame.iloc[1].tolist() == [
        "`plain`, fp32", "backward", "7 → 5", "12 → 7", "3 → 1", "1", "2 to 5", "7 → 6",
    ]  # fmt: skip
    assert frame.iloc[2].tolist()[1:] == ["forward", "9 → 3", "10 → 4", "2 → 1", *[MISSING] * 3]
    # Of one head Inductor makes on a GPU in fp32 what it makes of none.
    assert frame.iloc[4].tolist()[:5] == ["`heads`, fp32", "forward", *frame.iloc[0].tolist()[2:5]]
    assert frame.iloc[6].tolist()[2:5] == ["4 → 1", "6 → 0", "2 → 0"]


def test_what_inductor_recognised(chapter, one_head):
    heads = [{**shape("compile", p, 1), "written": "heads", "attentions": 1}
             for p in ("forward", "backward")]  # fmt: skip
    said = str(reasons.recognised(chapter(compile_attention=GRID + heads)))
    assert said == (
        "Inductor put PyTorch's own attention in the place of 0 of 6 compiled passes of `plain` in "
        "fp32 and 2 of 2 compiled passes of `heads` in fp32."
    )
    flash = [one_head("compile", "forward", 1, heads=16, causal="false", seq_len=n, dtype="bf16",
                      batch=2, peak_bytes=2 * 16 * n**2 * 2 - less)
             for n, less in ((1024, 1), (2048, 0))]  # fmt: skip
    more = str(reasons.recognised(chapter(compile_attention=GRID + heads, flash=flash)))
    assert more.startswith(said) and "less than one matrix in 1 of 2 forwards" in more


def test_the_floor_by_hand(chapter):
    c = chapter(ceiling=CEILING)
    # Heads so small that bytes alone count: 6 matrices of 8 GiB eager, 4 compiled, at 4 TB/s.
    matrix = 8 * 16384**2 * 4
    eager = reasons.least(c, "eager", "plain", "fp32", "forward", 16384, 1)
    assert eager.ms == pytest.approx(1e3 * 6 * matrix / 4e12, rel=1e-3)
    gain = reasons.predicted(c, "plain", "fp32", "forward", 16384, 1)
    assert gain == pytest.approx(1.5, rel=1e-3)
    # So large that products alone do: nothing to gain.
    assert reasons.predicted(c, "plain", "fp32", "forward", 1024, 1024) < 1.05


def test_one_head_in_fp32_has_the_floor_of_none(chapter):
    c = chapter(ceiling=CEILING)
    for pass_ in ("forward", "backward"):
        one, none = (reasons.least(c, "compile", written, "fp32", pass_, 4096, 64)
                     for written in ("heads", "plain"))  # fmt: skip
        assert one == none
        tiled = reasons.least(c, "compile", "heads", "bf16", pass_, 4096, 64)
        assert tiled.bytes < reasons.least(c, "compile", "plain", "bf16", pass_, 4096, 64).bytes


def test_the_measured_gain_stands_beside_the_predicted(chapter):
    c = chapter(ceiling=CEILING)
    floors = {
        (name, pass_): reasons.least(c, name, "plain", "fp32", pass_, 16384, 64).ms
        for name in ("eager", "compile") for pass_ in ("forward", "backward")
    }  # fmt: skip
    made = [shape(*key, 2 * ms) for key, ms in floors.items()]
    said = str(reasons.beside(chapter(ceiling=CEILING, compile_attention=made)))
    assert said.startswith(
        "At 16,384 tokens in fp32 the measured gain is 1.00 times the predicted one. The floor is "
        "50% of eager's time and 50% of compiled's time. Compiled's time beyond it is "
    )
    both_run = sorted(floors["compile", p] / floors["eager", p] for p in ("forward", "backward"))
    assert f"is {both_run[0]:.0%} to {both_run[1]:.0%} of eager's" in said
    wrong = [shape(*key, ms / 2) for key, ms in floors.items()]
    said = str(reasons.beside(chapter(ceiling=CEILING, compile_attention=wrong)))
    assert said == (
        "Below the floor, so that the floor or the time is wrong, or the products are others than "
        "those of the ceiling: `plain`, backward, heads of 64; `plain`, forward, heads of 64."
    )
    said = str(reasons.beside(chapter(ceiling=CEILING, compile_attention=made[::2] + wrong[1::2])))
    assert "The floor is 50% of eager's time and 50% of compiled's time." in said
    assert said.endswith("those of the ceiling: `plain`, backward, heads of 64.")
    frame = reasons.table(chapter(ceiling=CEILING, compile_attention=made), "c", "tab-c").frame
    line = frame[(frame["d"] == 64) & (frame["pass"] == "forward")].iloc[0]
    assert line["gain: floor"] == line["measured"]


def test_what_compiling_saves_by_value(chapter):
    matrix = 8 * 4096**2 * 4
    bytes_ = {"forward": 2 * matrix, "backward": 5 * matrix}

    def pair(n, pass_, rate, d):  # compiled is moved * 1e3 / rate ms faster than eager's
        size = bytes_[pass_] * (n // 4096) ** 2
        return [shape("eager", pass_, 100 + size / rate / 1e9, n, d, gpu=100 + size / rate / 1e9),
                shape("compile", pass_, 100, n, d, gpu=100)]  # fmt: skip

    made = [row for n, rate in ((4096, 4), (8192, 1), (16384, 3)) for d in (16, 64)
            for p in ("forward", "backward")
            for row in pair(n, p, rate * (4 if p == "backward" else 1), d)]  # fmt: skip
    c = chapter(compile_attention=made, ceiling=CEILING)
    frame = reasons.saved(c, "c", "tab-c").frame
    assert len(frame) == 6 and frame.iloc[1].tolist() == [
        "forward", "8,192", f"{8 * matrix / 1e9:.2f}", f"{8 * matrix / 1e9:.2f}", "1.00", "25%",
    ]  # fmt: skip
    assert str(reasons.rates(c)).endswith("It had been moved slowest forward at 8,192 tokens.")
    fast = [row for row in made if row["seq_len"] < 16384]
    assert str(reasons.rates(chapter(compile_attention=fast))).endswith(
        "moved slowest forward at 8,192 tokens, and there the gain is largest: eager is slow, not "
        "compiled fast."
    )


def test_bytes_and_peaks_on_the_gpu_are_held_against_those_derived(chapter):
    def row(name, pass_, matrices, more=0, **where):
        counted = sum(
            k.read + k.written for k in attention_kernels("compile", "plain", pass_, 8, 4096, 64, 4)
        )
        made = {"moved_bytes": counted + more} if name == "compile" else {}
        peak = int(matrices * 8 * 4096**2 * 4) + 10**7
        return shape(name, pass_, 1, 4096, peak_bytes=peak, **made, **where)

    made = [row("eager", "forward", 2), row("eager", "backward", 2),
            row("compile", "forward", 1), row("compile", "backward", 1, more=4)]  # fmt: skip
    made += [shape("compile", "forward", 1, 256)]  # of an older run, with neither
    assert str(reasons.as_counted(chapter(compile_attention=made))) == (
        "On the H200 what is derived was found in 1 of 2 counts of bytes (Inductor's, to the byte) "
        "and 3 of 4 peaks (from 4,096 tokens on, to the nearest matrix) of `plain`."
    )


def test_what_is_cut_and_what_is_split_where_a_matrix_is_large(chapter):
    # Four passes over 10**9 of the 2**31 elements, and q, k, v and o of 8 x 16384 x 64.
    bytes_ = 4 * 4 * 10**9 + 4 * 4 * 8 * 16384 * 64
    made = [shape("compile", "forward", 1, moved_bytes=bytes_, launches=3),
            shape("eager", "forward", 1, launches=7),
            shape("eager", "backward", 1, launches=12)]  # fmt: skip
    assert str(reasons.as_counted(chapter(compile_attention=made))) == (
        "On the H200 what is derived was found in 1 of 1 counts of bytes (Inductor's, to the byte) "
        "and 2 of 3 counts of launches of `plain`. Inductor counts no more than 10⁹ "
        "elements of an operand, and at 16,384 tokens, where a matrix has more, the derived bytes "
        "are cut likewise. PyTorch's element-wise kernels index no more than 2 GiB: where a matrix "
        "has more, at 16,384 tokens, eager launches them in pieces."
    )


def test_published_figures_and_what_their_memory_says(empty):
    c = empty
    assert published.gain(c, published.H800, head_dim=16, seq_len=16384, phase="forward") == (
        pytest.approx(70.177 / 25.981)
    )
    saved, more = published.matrices(c, published.UNNAMED, "eager")
    assert saved == pytest.approx(8240.25 / 8192)
    assert more == pytest.approx((32848.25 - 8240.25) / 8192)
    said = str(published.memory(c))
    assert "saves 1.01 matrices" in said
    assert "allocates 3.00 more; compiled it allocates 1.03" in said
    assert "The closed form says 3 and 1" in said and "saves 2.04" in said
    found = published.attention(c, "c", "tab-c").frame
    assert len(found) == 12 and found.iloc[0].tolist() == [
        16, "256", f"{0.22 / 0.30:.2f}", "1.16", MISSING, "1.38", "1.19", MISSING,
    ]  # fmt: skip
    whole = published.models(c, "c", "tab-c").frame.set_index("model")
    assert whole.loc["small"].tolist()[3:5] == ["1.37", "1.34"]
    assert whole.loc["2.7B", "train-step "] == f"{3027.354 / 2878.511:.2f}"
    assert whole.loc["medium", "train-step  "] == f"{97.03 / 90.13:.2f}"


def test_the_published_step_that_compiling_slowed(empty):
    said = str(published.outlier(empty))
    assert "(1072 ± 155 ms) than eager (1000 ms)" in said
    # One of ten that is x above the rest: mean + x / 10, deviation x / sqrt(10).
    x = 155.152 * math.sqrt(10)
    assert f"takes {x:.0f} ms more" in said and f"the mean is {1072.056 - x / 10:.0f} ms" in said


def test_the_published_forward_that_its_own_step_contradicts(empty, chapter):
    said = str(published.contradiction(empty))
    assert f"leaves {19.32 - 12.35:.2f} ms for backward and optimizer" in said
    assert f"where eager takes {26.65 - 6.71:.1f}." in said and said.endswith("for the host.")
    assert str(published.contradiction(chapter(compile_model=STEPS))).endswith(
        "Here the small model's forward is 1.50 times as fast compiled."
    )


def test_the_published_mean_is_of_two_regimes(empty):
    said = str(published.averaged(empty))
    assert "over all shapes to 0.93" in said  # as printed there
    assert re.search(r"0\.\d\d on average up to 1,024 tokens and 1\.\d\d beyond", said)


def test_another_machine_is_shown_as_such(synthetic, tmp_path):
    made = {"compile_attention": both(64, (1, 2), (3, 4)), "compile_model": STEPS}
    c = Compile([synthetic.by_hand(tmp_path, device="cpu", **made)])
    assert not len(c.grid) and not len(c.models)
    shown = str(local.show(c))
    assert shown.count("tiny sizes") == 1
    assert "| plain | fp32 | 64 | 64 | forward | compile | 3.00 |" in shown


def test_without_rows_every_result_says_that_it_is_not_measured(empty):
    told = [answer.sentence, answer.untimed, answer.regimes, reasons.recognised, reasons.beside]
    told += [answer.other_ways, reasons.as_counted, reasons.rates, cost.sentence]
    told += [models.measured, models.one_graph, models.explained, models.host, models.at_lengths]
    for sentence in told:
        assert str(sentence(empty)).startswith("**Not measured yet on an NVIDIA H200**")
    tables = (models.why, models.lengths, reasons.table, reasons.saved, cost.attention, cost.models)
    for table in tables:
        assert not len(table(empty, "c", "tab-c").frame)
    assert "nothing had been measured" in str(local.show(empty))
    assert answer.chart(empty)._repr_svg_()


@pytest.mark.parametrize("measured", [False, True])
def test_every_cell_of_the_page_runs(synthetic, tmp_path, shown_by, measured):
    if measured:
        sections = {"compile_attention": GRID, "compile_model": STEPS, "ceiling": CEILING}
        synthetic.by_hand(tmp_path, **sections)
    shown = shown_by("compile", tmp_path)
    assert len(shown) >= 25
    text = "\n".join(shown)
    assert ("of the small model takes 100 ms eager" in text) == measured
    assert ("which of the three Inductor recognises" in text) != measured
