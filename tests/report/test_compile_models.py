"""What the chapter on torch.compile says of whole models and of the cost, by value."""

import math

import pytest
from benchmark_rows import CEILING
from compile_rows import GRID, STEPS, both, counted, replayed, step

from a2lib.report.chapters.compile import Compile, answer, cost, models, published
from a2lib.report.tables import MISSING
from a2lib.theory.roofline import compiled_step, eager_step
from a2lib.theory.transformer import SIZES


@pytest.fixture
def chapter(synthetic, tmp_path):
    def make(**sections):
        return Compile([synthetic.by_hand(tmp_path, **sections)])

    return make


def test_what_a_models_gain_is_made_of(chapter):
    kernels = {step: step(SIZES["small"], 4, 512, "fp32") for step in (eager_step, compiled_step)}
    eager = sum((k.read + k.written) * k.count for k in kernels[eager_step])
    optimizer = sum((k.read + k.written) * k.count for k in kernels[eager_step]
                    if k.phase == "optimizer")  # fmt: skip
    made = step("none", 30, 60) + counted(step("blocks", 10, 20), eager // 2 - optimizer)
    without = models.why(chapter(compile_model=made, ceiling=CEILING), "c", "tab-c").frame
    assert without.iloc[0]["replayed, ms"] == MISSING
    c = chapter(compile_model=made, ceiling=CEILING, benchmark=[replayed(70)])
    assert models.moved(c, "small", "fp32") == (eager, eager // 2)
    # Of 60 ms gained 30 are gaps; half of the bytes in the other 30.
    assert str(models.explained(c)).startswith(
        "In fp32 50% of the time gained is that of gaps between eager's launches, which a replay "
        "has not either. The rest is memory traffic: 50% of eager's bytes are not moved, and saved "
        f"at {eager / 2 / 30e9:.1f} TB/s, where a copy reaches 4.0."
    )
    floors = models.floors(c, "small", "fp32")
    launches = sum(k.count for k in kernels[eager_step])
    assert floors[0].launches == launches
    assert models.why(c, "c", "tab-c").frame.values.tolist() == [[
        "small, fp32", f"{launches:,} → 46", f"{eager / 1e9:.1f} → {eager / 2e9:.1f}",
        f"{floors[0].ms:.1f} → {floors[1].ms:.1f}", "100 → 40.0", "70.0",
        f"{floors[0].ms / floors[1].ms:.2f}",
    ]]  # fmt: skip


def test_models_by_phase(chapter):
    heavy = [{**row, "peak_bytes": (8 if row["compile"] == "none" else 6) * 10**9} for row in STEPS]
    c = chapter(compile_model=heavy)
    frame = models.table(c, "fp32", "c", "tab-c").frame.astype(str)
    assert frame.values.tolist() == [
        ["small", "eager", "30.0", "60.0", "100", *[MISSING] * 3, "8.00"],
        ["small", "one graph", "20.0", "20.0", "50.0", "1.50", "2.22", "2.00", "6.00"],
    ]  # fmt: skip
    assert not len(models.table(c, "bf16", "c", "tab-c").frame)
    assert str(models.measured(c)) == (
        "At 512 tokens compiling makes in fp32 a forward 1.50, a forward and backward 2.22 and a "
        "train-step 2.00 times as fast. The peak of memory is 0.75 of eager's."
    )
    more = [*STEPS, *step("blocks", 25, 25), *step("none", 30, 60, precision="bf16"),
            *step("blocks", 30, 10, precision="bf16")]  # fmt: skip
    assert str(models.measured(chapter(compile_model=more))) == (
        "At 512 tokens compiling makes in fp32 a forward 1.20 to 1.50, a forward and backward 1.78 "
        "to 2.22 and a train-step 1.67 to 2.00 times as fast; in bf16 a forward 1.00, a forward "
        "and backward 2.22 and a train-step 2.00 times as fast."
    )


def test_one_graph_beside_blocks(chapter):
    fp32 = counted(step("blocks", 25, 25), 100) + counted(step("model", 20, 20), 102)
    bf16 = [*step("blocks", 40, 50, precision="bf16"), *step("model", 20, 20, precision="bf16")]
    for row in bf16:
        row["ms_host"] = row["ms"]
    fp32[0]["kernels_called"], fp32[6]["kernels_called"] = 24, 18
    assert str(models.one_graph(chapter(compile_model=fp32 + bf16))) == (
        "As one graph a train-step takes, of its time with compiled blocks, 0.83 in fp32 (small); "
        "0.50 in bf16 (small). On the GPU there is nothing to gain: by Inductor's count its fp32 "
        "graph moves 1.02 of the blocks' bytes. Of its own kernels small calls 24 → 18 forward and "
        "12 → 12 backward: what ends a block and what begins the next can be one. The backward's "
        "count was not looked into. In bf16, where the host holds small up, one graph is "
        "issued in 50.0 ms, the blocks in 100 ms."
    )
    c = chapter(compile_model=fp32 + bf16)
    c.models.loc[c.models["compile"] == "model", "run"] = "another"
    assert str(models.one_graph(c)).endswith("Graph and blocks are of different runs for small.")


def test_whose_time_a_step_in_bf16_is(chapter):
    made = [*step("none", 30, 60, precision="bf16"), *step("blocks", 30, 10, precision="bf16"),
            *step("none", 300, 600, model="2.7B", precision="bf16"),
            *step("blocks", 300, 145, model="2.7B", precision="bf16")]  # fmt: skip
    for row in made:
        row["ms_host"] = row["ms"] * (0.95 if row["model"] == "small" else 0.5)
        row |= {"ms_p20": 0.8 * row["ms"], "ms_p80": 1.25 * row["ms"]}
    c = chapter(compile_model=made, benchmark=[replayed(45, precision="bf16")])
    assert models.held_up(c, "small", "blocks", "bf16")
    assert not models.held_up(c, "2.7B", "none", "bf16")
    assert str(models.host(c)) == (
        "In bf16 products are short, and issuing the step takes the host 90% or more of its time "
        "(eager: small; in blocks: small). Their gain is one of fewer launches. It is known no "
        "better than the host's time, which scatters: from the 20th to the 80th percentile of both "
        "it is 1.3 to 3.1 for small. For small a CUDA graph does more than the compiler: eager's "
        "own step, captured and replayed ([another run](#benchmark-ways)), takes 45.0 ms, less "
        "than compiled block by block. The host does not hold up 2.7B (2.00): that gain is the "
        "GPU's own."
    )
    said = str(models.host(chapter(compile_model=made, benchmark=[replayed(55, precision="bf16")])))
    assert "CUDA graph" not in said


def test_models_at_other_lengths(chapter):
    made = [{**row, "ms_host": row["ms"] * (1 if n == 128 else 0.1)} for n in (128, 512, 1024)
            for way, ms in (("none", n / 4), ("blocks", n / 8))
            for row in step(way, ms, ms, context=n)]  # fmt: skip
    c = chapter(compile_model=made)
    frame = models.lengths(c, "c", "tab-c").frame
    assert frame["tokens"].tolist() == ["128", "512", "1,024"]
    assert frame.iloc[0].tolist()[2:] == ["74.0", "42.0", "74.0", "42.0", "2.00", "1.97", "1.76"]
    assert str(models.at_lengths(c)) == (
        "The host holds up small at 128 tokens eager and small at 128 tokens in blocks. Without it "
        "the gain of a train-step is, over these lengths, 1.93 to 1.96 (small)."
    )
    assert not len(models.lengths(chapter(compile_model=STEPS), "c", "tab-c").frame)


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
        "From an empty cache compiling attention (fp32, heads of 64) has paid after 20 calls at "
        "16,384 tokens, and is not shown to pay at 256 tokens.\n\nCompiling a train-step (fp32, "
        "512 tokens) as one graph takes 20 s and has paid after 400 steps of small. One block is "
        "compiled for all, so blocks take much the same for any model; one graph takes 1.7 s for "
        "each block."
    )
    table = cost.attention(c, "c", "tab-c").frame.astype(str).values.tolist()
    assert table[1] == ["16,384", "2.0", "3.0", "0.50", "20", "2"]
    assert table[0][-2:] == ["not shown", "not shown"]
    frame = cost.models(c, "c", "tab-c").frame.astype(str).values.tolist()
    assert frame == [
        ["small", "fp32", "one graph", "20", "10", "5.0", "1", "400", "100"],
    ]  # fmt: skip


def test_a_gain_within_the_spread_is_not_shown_to_pay(chapter):
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
    assert "as one graph takes 0 s and is not shown to pay for small." in str(cost.sentence(c))


def test_what_was_compiled_once_has_no_time_from_the_cache(chapter):
    once = [{**row, "ms_warm": ""} for row in step("model", 20, 20, 20020, 0)]
    frame = cost.models(chapter(compile_model=step("none", 30, 60, 50, 20) + once), "c", "tab-c")
    cold, _, cached, _, pays, again = frame.frame.astype(str).values.tolist()[0][3:]
    assert (cold, cached, pays, again) == ("20", MISSING, "400", MISSING)


def test_the_largest_and_the_smallest_model_are_named(chapter):
    steps = [*STEPS, *step("none", 300, 600, model="2.7B"), *step("blocks", 300, 510, model="2.7B")]
    steps += [*step("none", 60, 60, model="large"), *step("blocks", 60, 60, model="large")]
    assert str(answer.sentence(chapter(compile_attention=GRID, compile_model=steps))).endswith(
        "\n\nA train-step (fp32, 512 tokens) of the 2.7B model takes 910 ms eager and 820 ms "
        "compiled block by block, 1.11 times as fast; one of the small model takes 100 ms eager "
        "and 50.0 ms compiled as one graph, 2.00 times as fast. In fp32 compiling takes 20 s as "
        "one graph."
    )
    whole = published.models(chapter(compile_model=steps), "c", "tab-c").frame.set_index("model")
    assert whole.loc["2.7B"].tolist()[:3] == ["*1.00*", "*1.18*", "*1.11*"]
    assert whole.loc["small"].tolist()[:3] == ["1.50", "3.00", "2.00"]


def test_a_cache_that_keeps_less_in_bf16_is_said(chapter):
    made = [*step("none", 30, 60), *step("model", 20, 20, 20000, 2000)]
    narrow = [{**row, "precision": "bf16"} for row in made]
    assert "From a full cache" not in str(cost.sentence(chapter(compile_model=made + narrow)))
    narrow = [*step("none", 30, 60, precision="bf16"),
              *step("model", 20, 20, 20000, 9000, precision="bf16")]  # fmt: skip
    assert "From a full cache small as one graph still takes 2.0 s, and in bf16 9.0 s: " in str(
        cost.sentence(chapter(compile_model=made + narrow))
    )


def test_many_models_are_told_by_the_two_ends(chapter):
    made = [
        row
        for i, m in enumerate(("small", "medium", "large", "xl25"), 1)
        for row in [*step("none", 30, 60, model=m), *step("blocks", 20, 20, 1000 * i, model=m)]
    ]
    assert "block by block takes 1 to 4 s and has paid after 20 steps of small to 80 steps of" in (
        str(cost.sentence(chapter(compile_model=made)))
    )  # fmt: skip
