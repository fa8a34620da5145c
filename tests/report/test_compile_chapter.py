"""What the chapter on torch.compile says, by value: rows made by hand, in round milliseconds."""

import math
import re

import pytest

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
from a2lib.report.tables import MISSING
from a2lib.theory.compiling import attention_kernels
from a2lib.theory.roofline import compiled_step, eager_step
from a2lib.theory.transformer import SIZES

# 2 * 8192**3 operations at 50 TFLOP/s, and at 800 in bf16; 2 * 2**30 bytes at 4 TB/s.
CEILING = [
    {"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
    {"operation": "matmul", "dtype": "bf16", "size": 8192, "ms": 2 * 8192**3 / 800e9},
    {"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 2 * 2**30 / 4e9},
]
MADE = {"kernels_written": 1, "kernels_called": 1, "library_calls": 2, "attentions": 0}


def shape(implementation, pass_, ms, n=16384, d=64, gpu="", host="", **more):
    made = MADE if implementation == "compile" else {}
    return {
        "implementation": implementation, "written": "plain", "dtype": "fp32", "batch": 8,
        "seq_len": n, "head_dim": d, "pass": pass_, "ms": ms, "ms_p20": ms, "ms_p80": ms, "n": 9,
        "ms_graph": gpu, "ms_host": host, **made, **more,
    }  # fmt: skip


def both(n, eager, compiled, **more):
    """Forward and backward of a length: (forward, backward) in ms of each."""
    return [
        shape(name, pass_, ms, n, **more)
        for name, times in (("eager", eager), ("compile", compiled))
        for pass_, ms in zip(("forward", "backward"), times, strict=True)
    ]


GRID = both(1024, (2, 4), (3, 4)) + both(4096, (10, 20), (5, 19))
GRID += both(16384, (100, 300), (50, 100))


def step(way, forward, backward, cold=0, warm=0, model="small", context=512, precision="fp32"):
    """A train-step of forward, backward, 1 ms of loss and 9 of the optimizer; its first steps."""
    parts = {"forward": forward, "loss": 1, "backward": backward, "optimizer": 9}
    parts |= dict.fromkeys(("step", "wall"), sum(parts.values()))
    made = {**MADE, "kernels_called": 12, "library_calls": 34} if way != "none" else {}
    return [
        {"model": model, "context": context, "batch": 4, "mode": "train-step",
         "precision": precision, "attention": "eager", "compile": way, "phase": phase, "ms": ms,
         "ms_mean": ms, "ms_min": ms, "n": 10, **made,
         "ms_cold": ms + cold * (0.5 if phase in ("forward", "backward") else 1),
         "ms_warm": ms + warm}
        for phase, ms in parts.items()
    ]  # fmt: skip


STEPS = step("none", 30, 60, 50, 20) + step("model", 20, 20, 20020, 5020)


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
        "ahead from 2,048 tokens on, forward and backward.\n\n**Not measured yet on an NVIDIA H200**: "
        "the grid of the handout, batch 8 without heads, and whole models."
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
        "no length.\n\nA train-step (fp32, 512 tokens) of the small model takes 100 ms eager and 200 ms compiled "
        "block by block, 2.00 times as long. In fp32 compiling takes 0 s block by block."
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


def test_the_other_ways_to_write_it_by_value(chapter):
    heads = [{**row, "written": "heads"} for row in both(16384, (100, 300), (25, 100))]
    short = [{**row, "dtype": "bf16"} for row in both(4096, (10, 20), (20, 10))]
    assert str(answer.other_ways(chapter(compile_attention=[*GRID, *heads, *short]))) == (
        "Compiled, with heads of 64: with a dimension of one head it is 4.00 times as fast forward "
        "and 3.00 times as fast backward at 16,384 tokens; in bf16 it is 0.50 times as fast "
        "forward and 2.00 times as fast backward at 4,096 tokens. **Not measured yet on an NVIDIA "
        "H200**: attention with a mask."
    )


def test_whose_time_it_is(chapter):
    made = both(256, (1, 2), (2, 1), host=0.1) + both(1024, (2, 2), (1, 1))
    made += both(4096, (1, 2), (2, 1))
    for row in made:
        eager = row["implementation"] == "eager"
        row["ms_graph"], row["ms_host"] = (2, 0.1) if eager else (1, 0.2)
    made[5]["ms_graph"] = made[8]["ms_graph"] = 0.5
    assert str(answer.regimes(chapter(compile_attention=made))) == (
        "On the GPU alone compiled is ahead of eager in 4 of 6 passes. As called it is behind in "
        "2, in 1 of which the GPU alone would be ahead: there the host's time decides, up to 256 "
        "tokens. To issue one call takes the host 200 µs forward where eager takes 100 µs and 200 "
        "µs backward where eager takes 100 µs, medians at the shortest length."
    )


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
        "softmax(q k^T) v", "backward", "7 → 5", "12 → 7", "3 → 1", "1", "2 to 5", "7 → 6",
    ]  # fmt: skip
    assert frame.iloc[2].tolist()[1:] == ["forward", "9 → 3", "10 → 4", "2 → 1", *[MISSING] * 3]
    assert frame.iloc[4].tolist()[2:5] == ["4 → 1", "6 → 0", "2 → 0"]


def test_what_inductor_recognised(chapter):
    heads = [{**shape("compile", p, 1), "written": "heads", "attentions": 1}
             for p in ("forward", "backward")]  # fmt: skip
    assert str(reasons.recognised(chapter(compile_attention=GRID + heads))) == (
        "Inductor put PyTorch's own attention in the place of 0 of 6 compiled passes of `plain` "
        "and 2 of 2 compiled passes of `heads`."
    )


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
        "50% of eager's time and 50% of compiled's time."
    )
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
    assert line["gain: floor"] == line["measured  "]


def host_rows(one_head):
    """Eager attention's forward of 9 kernels in 90 us of the host's time."""
    return [one_head("eager", "forward", 1, dtype="fp32", seq_len=128, ms_host=0.09)]


def test_the_models_estimate(chapter, one_head):
    c = chapter(ceiling=CEILING, flash=host_rows(one_head))
    assert models.per_launch(c) == pytest.approx(10)
    eager, compiled = models.floors(c, "small", "bf16")
    steps = [sum(k.count for k in s(SIZES["small"], 4, 512, "bf16"))
             for s in (eager_step, compiled_step)]  # fmt: skip
    assert [eager.launches, compiled.launches] == steps
    # In bf16 the small model's launches take longer than its kernels: at 10 us each.
    assert steps[0] / 100 > eager.ms
    assert models.expected(c, "small", "bf16") == pytest.approx(
        steps[0] / 100 / max(compiled.ms, steps[1] / 100)
    )
    gains = [models.expected(c, m, "fp32") for m in ("small", "10B")]
    assert gains[0] > gains[1] > 1
    said = str(models.sentence(c))
    assert f"in fp32 {gains[0]:.2f} for small and {gains[1]:.2f} for 10B" in said
    assert "At 10 µs a launch, in fp32 the host holds up none of them." in said
    assert len(models.estimate(c, "c", "tab-c").frame) == 12


def test_models_by_phase(chapter, one_head):
    c = chapter(compile_model=STEPS, ceiling=CEILING, flash=host_rows(one_head))
    frame = models.table(c, "c", "tab-c").frame.astype(str)
    allowed = f"{models.expected(c, 'small', 'fp32'):.2f}"
    assert frame.values.tolist() == [
        ["small", "512", "fp32", "eager", "30.0", "60.0", "9.00", "100", *[MISSING] * 4],
        ["small", "512", "fp32", "one graph", "20.0", "20.0", "9.00", "50.0", "1.50", "2.22",
         "2.00", allowed],
    ]  # fmt: skip
    assert str(models.measured(c)) == (
        "At 512 tokens compiling makes in fp32 a forward 1.50, a forward and backward 2.22 and a "
        "train-step 2.00 times as fast. More than the estimate allows, so that it misses "
        "something: small (one graph, fp32)."
    )
    more = [*STEPS, *step("blocks", 25, 25), *step("none", 30, 60, precision="bf16"),
            *step("blocks", 30, 10, precision="bf16")]  # fmt: skip
    said = str(models.measured(chapter(compile_model=more)))
    assert said.startswith(
        "At 512 tokens compiling makes in fp32 a forward 1.20 to 1.50, a forward and backward 1.78 "
        "to 2.22 and a train-step 1.67 to 2.00 times as fast; in bf16 a forward 1.00, a forward "
        "and backward 2.22 and a train-step 2.00 times as fast. As one graph a train-step takes "
        "0.83 of the time that it takes with its blocks compiled (small)."
    )


def test_steps_of_two_runs_are_named(chapter, synthetic, tmp_path):
    made = step("none", 30, 60) + step("blocks", 25, 50) + step("model", 20, 20)
    assert "different runs" not in str(models.measured(chapter(compile_model=made)))
    other = synthetic.by_hand(tmp_path / "other", compile_model=made)
    c = Compile([other])
    c.models.loc[c.models["compile"] == "model", "run"] = "another"
    assert str(models.measured(c)).endswith("One graph and eager are of different runs for small.")


def test_train_steps_without_a_time_have_their_reason(chapter):
    note = "in warmup 0, backward: CUDA out of memory. Tried to allocate 4 MiB. GPU 0 has a total"
    key = {name: STEPS[0][name] for name in ("context", "batch", "mode", "precision", "attention")}
    refused = {**key, "model": "2.7B", "compile": "model", "phase": "wall", "status": "oom"}
    assert "Not measured yet on" in str(models.untimed(chapter()))
    c = chapter(compile_model=[*STEPS, refused | {"note": note}])
    said, left = str(models.untimed(c)).split("\n\n")
    assert said == (
        "- 2.7B, 512 tokens, fp32, one graph: oom (in warmup 0, backward: CUDA out of memory. "
        "Tried to allocate 4 MiB)"
    )
    assert left.startswith("**Not measured yet** in fp32 at 512 tokens: small (blocks), medium (ea")
    assert left.endswith("2.7B (eager) and 2.7B (blocks).")
    ways = ("none", "blocks", "model")
    every = [row for m in ("small", "medium", "large", "xl25", "2.7B") for way in ways
             for row in step(way, 1, 1, model=m)]  # fmt: skip
    assert str(models.untimed(chapter(compile_model=every))) == (
        "Every train-step that was measured has a time."
    )


def test_what_compiling_costs_and_when_it_has_paid(chapter):
    # Eager gains 250 ms a call; the first calls take 2 and 3 s beyond the later ones.
    made = both(16384, (100, 300), (50, 100))
    for row in made[2:]:
        more = 2000 if row["pass"] == "forward" else 3000
        row |= {"ms_cold": row["ms"] + more, "ms_warm": row["ms"] + more / 10}
    never = both(256, (1, 1), (2, 2), ms_cold=5, ms_warm=5)
    c = chapter(compile_attention=made + never, compile_model=STEPS)
    assert cost.attention_pays(c, 16384, "fp32", 64, "ms_cold") == pytest.approx(5000 / 250)
    assert cost.attention_pays(c, 256, "fp32", 64, "ms_cold") is None
    assert math.isnan(cost.attention_pays(c, 4096, "fp32", 64, "ms_cold"))
    # The first compiled step takes 20,020 ms beyond a steady one, of which eager's own takes 20.
    assert cost.model_extra(c, "small", "model", "fp32", "ms_cold") == 20000
    assert cost.model_pays(c, "small", "model", "fp32", "ms_warm") == 100
    assert str(cost.sentence(c)) == (
        "From an empty cache, compiling attention (fp32, heads of 64) has paid after 20 calls at "
        "16,384 tokens, and never pays at 256 tokens; a train-step (fp32, 512 tokens) as one graph "
        "has paid after 400 steps of small."
    )
    table = cost.attention(c, "c", "tab-c").frame.astype(str).values.tolist()
    assert table[1] == ["16,384", "2.0", "3.0", "0.20", "0.30", "20", "2"]
    assert table[0][-2:] == ["never", "never"]
    frame = cost.models(c, "c", "tab-c").frame.astype(str).values.tolist()
    assert frame == [["small", "fp32", "one graph", "10", "10", "20", "5.0", "1", "12", "34", "400",
                      "100"]]  # fmt: skip


def test_a_gain_within_the_spread_never_pays(chapter):
    made = both(1024, (10, 10), (9, 9), ms_cold=500, ms_warm=50)
    steps = step("none", 30, 60) + step("model", 29, 59, 500, 50)
    c = chapter(compile_attention=made, compile_model=steps)
    assert cost.attention_pays(c, 1024, "fp32", 64, "ms_cold") == pytest.approx(982 / 2)
    assert cost.model_pays(c, "small", "model", "fp32", "ms_cold") > 0
    wide = [{**row, "ms_p80": 1.2 * row["ms"]} for row in made]
    slow = [{**row, "ms_p80": 1.1 * row["ms"]} for row in steps]
    c = chapter(compile_attention=wide, compile_model=slow)
    assert cost.attention_pays(c, 1024, "fp32", 64, "ms_cold") is None
    assert cost.model_pays(c, "small", "model", "fp32", "ms_cold") is None
    assert str(cost.sentence(c)).endswith("as one graph never pays for small.")


def test_what_was_compiled_once_has_no_time_from_the_cache(chapter):
    once = [{**row, "ms_warm": ""} for row in step("model", 20, 20, 20020, 0)]
    frame = cost.models(chapter(compile_model=step("none", 30, 60, 50, 20) + once), "c", "tab-c")
    cold, cached, *_, pays, again = frame.frame.astype(str).values.tolist()[0][5:]
    assert (cold, cached, pays, again) == ("20", MISSING, "400", MISSING)


def test_the_largest_and_the_smallest_model_are_named(chapter):
    steps = [*STEPS, *step("none", 300, 600, model="2.7B"), *step("blocks", 300, 510, model="2.7B")]
    steps += [*step("none", 60, 60, model="large"), *step("blocks", 60, 60, model="large")]
    assert str(answer.sentence(chapter(compile_attention=GRID, compile_model=steps))).endswith(
        " A train-step of the 2.7B model takes 910 ms eager and 820 ms compiled block by block, "
        "1.11 times as fast; one of the small model takes 100 ms eager and 50.0 ms compiled as one "
        "graph, 2.00 times as fast."
    )
    whole = published.models(chapter(compile_model=steps), "c", "tab-c").frame.set_index("model")
    assert whole.loc["2.7B"].tolist()[-3:] == ["*1.00*", "*1.18*", "*1.11*"]
    assert whole.loc["small"].tolist()[-3:] == ["1.50", "3.00", "2.00"]


def test_bytes_and_peaks_on_the_gpu_are_held_against_those_derived(chapter):
    def row(name, pass_, matrices, more=0, **where):
        counted = sum(k.read + k.written
                      for k in attention_kernels("compile", "plain", pass_, 8, 4096, 64, 4))
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
    assert len(found) == 20 and found.iloc[0].tolist() == [
        16, "256", f"{0.22 / 0.30:.2f}", "1.16", MISSING, "1.38", "1.19", MISSING,
    ]  # fmt: skip
    whole = published.models(c, "c", "tab-c").frame.set_index("model")
    assert whole.loc["small"].tolist()[:2] == ["1.37", "1.34"]
    assert whole.loc["2.7B", "train-step"] == f"{3027.354 / 2878.511:.2f}"
    assert whole.loc["medium", "train-step "] == f"{97.03 / 90.13:.2f}"


def test_the_published_step_that_compiling_slowed(empty):
    said = str(published.outlier(empty))
    assert "(1072 ± 155 ms) than eager (1000 ms)" in said
    # One of ten that is x above the rest: mean + x / 10, deviation x / sqrt(10).
    x = 155.152 * math.sqrt(10)
    assert f"takes {x:.0f} ms more" in said and f"the mean is {1072.056 - x / 10:.0f} ms" in said


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
    told += [answer.other_ways, reasons.as_counted, models.sentence, models.measured, cost.sentence]
    for sentence in told:
        assert str(sentence(empty)).startswith("**Not measured yet on an NVIDIA H200**")
    for table in (reasons.table, models.estimate, models.table, cost.attention, cost.models):
        assert not len(table(empty, "c", "tab-c").frame)
    assert "nothing had been measured" in str(local.show(empty))
    assert answer.chart(empty)._repr_svg_()


@pytest.mark.parametrize("measured", [False, True])
def test_every_cell_of_the_page_runs(synthetic, tmp_path, shown_by, one_head, measured):
    if measured:
        synthetic.by_hand(tmp_path, compile_attention=GRID, compile_model=STEPS, ceiling=CEILING,
                          flash=host_rows(one_head))  # fmt: skip
    shown = shown_by("compile", tmp_path)
    assert len(shown) >= 25
    text = "\n".join(shown)
    assert ("A train-step of the small model takes 100 ms eager" in text) == measured
    assert ("which of the three Inductor recognises" in text) != measured
