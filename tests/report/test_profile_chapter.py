"""What the chapter on the kernels of a step says, by value: a trace made by hand."""

import functools

import pytest
from profile_rows import KEY, SCORES, STEP, chapter, forward, lines, row

from a2lib.report.chapters.profile import (
    answer,
    checks,
    estimate,
    fusing,
    host,
    listing,
    local,
    published,
    softmax,
    timer,
    ways,
)
from a2lib.report.chapters.profile.rows import LINEAR, WAYS, Profile, calls, lacking
from a2lib.report.data import ReportError
from a2lib.theory.roofline import eager_step
from a2lib.theory.transformer import SIZES, forward_flops


@pytest.fixture
def made(synthetic, tmp_path):
    return functools.partial(chapter, synthetic, tmp_path)


@pytest.fixture
def empty(tmp_path):
    return Profile([tmp_path])


def test_the_answer_word_for_word(made):
    p = made([row(ms_timer=437.5)], ({}, STEP))
    small = (
        "**The answer.** In plain fp32 at 512 tokens, matrix products take 75% of the small "
        "model's kernel time in a forward, 70% with the backward and 60% of a whole step with "
        "AdamW{}. The top kernel of a forward is `gemm_a` in small, 85 calls and 55% of the "
        "time{}.\n\nThe softmax takes 0.80 times as long as the two products around it in "
        "small, with 2.0% of their operations and 80% of their bytes{}: memory is its limit, "
        "arithmetic is theirs. The GPU is idle for 20% of the small model's step{}."
    )
    assert str(answer.sentence(p)) == small.format(*[""] * 4)
    large = {"model": "2.7B"}
    p = made([row(ms_timer=437.5), row(ms_timer=351.0, **large)], ({}, STEP), (large, STEP))
    assert str(answer.sentence(p)) == small.format(
        "; 75%, 70% and 60% of the 2.7B model's",
        "; the same in 2.7B, 85 calls and 55% of the time",
        "; 0.80 times in 2.7B, with 1.6% and 76%",
        " and less than 1% of the 2.7B model's",
    )


def test_top_kernels_and_the_count_of_products(made):
    p = made((), ({}, STEP))
    found = lines(answer.tops(p, "c", "tab-c"), 3)
    assert found["small", "512", "forward"] == [
        "`gemm_a`", "85", "55.0%", "ffn.w1; lm_head",
    ]  # fmt: skip
    assert found["small", "512", "forward, backward"] == ["`gemm_c`", "218", "43.3%", "ffn.w1"]
    said = str(answer.same_top(p))
    assert said.startswith(
        "In each of 1 forwards one kernel of matrix products takes most, 55% of the time in 85 "
        "calls; which one depends on the sizes. With the backward it is the same kernel in 0 of 1 "
        "configurations. The count is a check"
    )
    # Of several it is said which have another.
    both = [("forward", "ffn.w1", "matmul", "gemm_a", 109, 90.0),
            ("backward", "ffn.w1", "matmul", "gemm_a", 218, 180.0)]  # fmt: skip
    p = made((), ({}, STEP), ({"context": 128}, both))
    assert "in 1 of 2 configurations (another in small at 512). The" in str(answer.same_top(p))
    lost = [(*k[:4], k[4] - 1, k[5]) if k[3] == "gemm_c" else k for k in STEP]
    assert str(answer.same_top(made((), ({}, lost)))).endswith(
        "1 of 2 traces have exactly these. **Not all are the model's**: small at 512: 326 in place "
        "of 327."
    )


# Every product in its place: 12 of each part of a block a forward, twice as many a backward.
PLACED = [
    (phase, part, "matmul", "gemm", times * (1 if part == "lm_head" else 12), 10.0)
    for phase, times in (("forward", 1), ("backward", 2))
    for part in (*LINEAR, SCORES, "attn.attention.values", "lm_head")
]


def test_what_adds_the_parts_of_a_product_is_none(made):
    """Its name is whole in newer traces; what is too short to be listed may be it, too."""
    parts = ("forward", "ffn.w2", "matmul", "sm80_xmma_gemm_execute_split_k_kernel__5x", 12, 1.0)
    p = made((), ({}, [*PLACED, parts]), ({"context": 128}, PLACED),
             ({"context": 256}, [*PLACED, (*parts[:3], "rest", 7, 1.0)]))  # fmt: skip
    assert str(answer.same_top(p)).endswith(
        "Every trace has exactly these. Where a product is small, cuBLAS divides it, and a second "
        "kernel (`split_k`, `splitKreduce`) adds the parts: that is no product, and the forwards "
        "of small at 256 (7, too short to be listed by name) and small at 512 (12) have such ones."
    )
    # A product whose name tells that it is divided is one.
    whole = [("forward", "ffn.w1", "matmul", "nvjet_sm90_tst_64x64_splitK_TNT", 5, 1.0)]
    assert calls(made((), ({}, whole)).of("small", 512)) == 5
    # As many more elsewhere do not make up for those that are missing.
    elsewhere = [k for k in PLACED if k[:2] != ("forward", "ffn.w1")]
    more = [*elsewhere, (*PLACED[0][:4], 13, 1.0)]
    said = str(answer.same_top(made((), ({}, more))))
    assert "**Not all are the model's**: small at 512: 110 in place of 109" in said
    assert lacking(made((), ({}, elsewhere)).of("small", 512), "small") == ["ffn.w1 (forward)"]


def test_a_name_that_was_cut_is_taken_from_the_trace_that_has_it_whole(made):
    """Two kernels have one name in the older trace, which alone knows who launched them."""
    long = "sm80_xmma_gemm_" + "x" * 64
    cut = [("forward", "ffn.w1", "matmul", f"{long}…", 60, 9.0),
           ("forward", "ffn.w2", "matmul", "gemm_b", 9, 8.0)]  # fmt: skip
    whole = [("forward", "forward", "matmul", f"{long}_kernel", 40, 8.6),
             ("forward", "forward", "matmul", f"{long}_split_k_kernel", 20, 0.4),
             ("forward", "forward", "matmul", "gemm_b", 9, 8.0)]  # fmt: skip
    p = made((), ({}, cut), ({"mode": "forward-backward"}, whole))
    (line,) = (cells for key, cells in lines(answer.tops(p, "c", "t"), 3).items()
               if key[2] == "forward")  # fmt: skip
    assert line[1:] == ["40", "50.6%", "ffn.w1"]
    assert "in small, 40 calls and 51% of the time" in str(answer.sentence(p))


def test_what_nsight_notes_of_its_ranges(made):
    note = {"note": "Not all NVTX events might have been collected."}
    assert str(checks.noted(made([row()], ({}, PLACED)))) == ""
    rows = [row(**note), row(context=128)]
    p = made(rows, ({}, PLACED), ({"profiler": "torch"}, PLACED))
    said = str(checks.noted(p))
    assert said.startswith("In the rows of 1 of 2 traces stands a note of Nsight Systems, that not")
    assert "missing. In each of 1 traces with ranges around modules every product lies" in said
    assert "; every trace has its 3 steps; and in small at 512 torch.profiler" in said
    assert "three modes" not in said
    modes = [({"mode": mode}, PLACED) for mode in ("forward", "forward-backward", "train-step")]
    assert "; 1 configurations were traced in three modes, and each phase has as many kernels" in (
        str(checks.noted(made(rows, *modes)))
    )
    lost = [*modes[:2], ({"mode": "train-step"}, [*PLACED, ("forward", "ffn", "copy", "x", 1, 1)])]
    assert "but phases of small at 512 differ from mode to mode" in str(
        checks.noted(made(rows, *lost))
    )
    said = str(checks.noted(made([row(**note)], ({}, PLACED[1:]))))
    assert said.endswith("In small at 512 products are missing from the range of their module.")


def test_names_and_parts_of_older_traces_are_read_as_newer_ones(made):
    update, scan = "Optimizer.step#AdamW.step", "cub::DeviceScan::ExclusiveScan"
    old = [("optimizer", update, "optimizer", "<unnamed>::adam<(int)4>", 1, 1.0),
           ("backward", scan, "other", "rest", 2, 1.0)]  # fmt: skip
    found = made((), ({}, old)).of("small", 512)
    assert list(found["part"]) == ["optimizer", "backward"]
    assert list(found["kernel"]) == ["adam<4>", "rest"]
    assert list(found["kind"]) == ["optimizer", "embedding"]
    strange = [("backward", "attn.attention.scores", "other", "rest", 2, 1.0),
               ("backward", "attn", "other", "mystery", 1, 1.0)]  # fmt: skip
    assert set(made((), ({}, strange)).of("small", 512)["kind"]) == {"other"}


def test_names_say_that_no_product_uses_the_tensor_cores(made):
    names = ["cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>", "sm80_xmma_gemm_f32_ffma_align",
             "sm80_xmma_gemm_warpsize2x2x1_ff…"]  # fmt: skip
    step = [("forward", "ffn.w1", "matmul", name, 1, 1.0) for name in names]
    said = "`ffma` or `simt` in every product's name"
    step += [("backward", "ffn.w1", "matmul", "cublasLt::splitKreduce_kernel", 1, 1.0)]
    assert said in str(answer.same_top(made((), ({}, step))))
    step += [("backward", "ffn.w1", "matmul", "nvjet_tst_192x192", 1, 1.0)]
    assert said not in str(answer.same_top(made((), ({}, step))))


def test_a_kernels_name_fits_a_phone():
    assert answer.short("cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>") == (
        "cutlass_80_simt_sgemm_256x128_8x4_tn_…"
    )
    assert answer.short("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x256x8_stage3_ffma") == (
        "sm80_xmma_gemm_tn_n_tilesize128x256x8…"
    )
    assert answer.short("gemm_a") == "gemm_a"


def test_what_launches_a_kernel_is_named_once():
    parts = ["attn.q_proj", "attn.k_proj", "attn.attention.scores", "ffn.w1", "lm_head"]
    assert answer._parts(parts) == "attention: k_proj, q_proj, scores; ffn.w1; lm_head"
    assert answer._parts([*parts, "ffn.w2"]).endswith("scores; ffn.w1; ffn.w2; …")
    assert answer._parts(["lm_head", "ffn.w1"]) == "ffn.w1; lm_head"


def test_what_is_no_product(made):
    p = made((), ({}, STEP))
    assert str(answer.not_products(p)) == (
        "What is no product takes 25.0% of the forward's kernel time in small, 48 of 157 kernels "
        "(softmax 16.0%, copy 5.0% and elementwise 4.0%)."
    )
    found = lines(answer.rest(p, "c", "tab-c"))
    assert list(found.items()) == [
        (("attention: softmax", "softmax"), ["12", "16.0%"]),
        (("attention: RoPE, copies", "copy"), ["12", "5.0%"]),
        (("attention: scores", "elementwise"), ["24", "4.0%"]),
    ]


def test_how_the_share_moves(made):
    compiled = [("forward", "forward", "attention", "flash", 12, 30.0),
                ("forward", "forward", "matmul", "gemm_a", 85, 30.0),
                ("backward", "backward", "fused", "triton_poi", 9, 40.0),
                ("optimizer", "optimizer", "optimizer", "adam", 1, 100.0)]  # fmt: skip
    way = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
    p = made((), ({}, STEP), (way, compiled))
    found = lines(answer.moves(p, "c", "tab-c"), 3)
    assert found == {
        ("plain", "small", "512"): ["75.0%", "70.0%", "60.0%", "350", "elementwise, 16.9%"],
        ("bf16, ours, compiled", "small", "512"):
            ["100.0%", "60.0%", "30.0%", "200", "optimizer, 50.0%"],
    }  # fmt: skip
    assert str(answer.shift(p)) == (
        "From inference to a whole step the products' share falls in 1 of 1 plain configurations, "
        "most in small at 512 tokens, by 15 points. There AdamW, which has no product, is 14% of "
        "the step's kernel time. The backward moves it by 5 points: its products take 1.8 "
        "times those of the forward, its other kernels 2.2 times the others."
    )
    rising = [*STEP[:7], ("backward", "ffn.w1", "matmul", "gemm_c", 218, 300.0)]
    assert str(answer.shift(made((), ({}, rising)))) == (
        "From inference to a whole step the products' share falls in 0 of 1 plain configurations. "
        "The backward moves it by 19 points: its products take 4.0 times those of the forward, its "
        "other kernels 0.0 times the others."
    )
    said = str(answer.shift(made((), ({}, STEP), ({"context": 128}, rising))))
    assert "falls in 1 of 2 plain configurations (not in small at 128), most in small at" in said


def test_a_mode_of_its_own_is_used_where_there_is_no_train_step(made):
    p = made((), ({"mode": "forward"}, STEP[:7]))
    assert p.share("small", 512, "forward") == 0.75
    assert p.share("small", 512, "train-step") is None
    assert "**Not measured yet" in str(answer.sentence(p))


def test_a_mode_by_itself_beside_its_phases(made):
    own = [(*k[:5], 2 * k[5] if k[2] == "softmax" else k[5]) for k in STEP[:7]]
    p = made((), ({}, STEP), ({"mode": "forward"}, own))
    said, left = str(checks.alone(p)).split("\n\n")
    assert left.startswith("**Not measured yet**, of the steps that this chapter is about: small ")
    assert said.endswith(
        "In 1 traces of modes by themselves they differ by at most 10.3 points, in the forward of "
        "small at 512 (plain)."
    )  # 75 of 100 beside 75 of 116


def test_softmax_and_products(made):
    p = made((), ({}, STEP))
    found = softmax.compared(p, "small", 512)
    assert (found.softmax, found.scores, found.values, found.masking) == (16, 10, 10, 4)
    assert found.times == 0.8 and found.flops == 4 * 64 / 5
    cost = softmax.costs("small", 512)
    scores = 4 * 12 * 12 * 512**2
    assert cost["softmax"] == softmax.Cost(5 * scores, 8 * scores)
    assert cost["products"].flops == 4 * 64 * scores
    assert cost["products"].bytes == 4 * (2 * scores + 4 * 4 * 12 * 12 * 512 * 64)
    # 4 * 64 * scores at 50 TFLOP/s and 8 * scores bytes at 4 TB/s, in ms.
    assert lines(softmax.table(p, "c", "tab-c"))["small", "512"] == [
        "10.0", "10.0", "4.00", "16.0", "0.80", "1/51", "0.773", "0.302",
    ]  # fmt: skip
    said = str(softmax.sentence(p))
    assert "51 times the operations" in said
    assert "take 1.25 times as long (20.0 and 16.0 ms)" in said
    assert "arithmetic binds the products, memory binds the softmax, which reaches 2%" in said


def test_without_ranges_of_parts_nothing_is_compared(made):
    p = made((), ({}, [(k[0], "forward", *k[2:]) for k in STEP]))
    assert softmax.compared(p, "small", 512) is None
    assert "**Not measured yet" in str(softmax.sentence(p))


def test_kernels_by_count_and_their_floors(made):
    p = made((), ({}, STEP))
    found = estimate.phases(p, "small")
    assert list(found) == ["forward", "loss", "backward", "optimizer"]
    assert found["forward"].seen == 157 and found["forward"].measured == (75.0, 25.0)
    step = eager_step(SIZES["small"], 4, 512, "fp32")
    assert found["forward"].counted == sum(k.count for k in step if k.phase == "forward")
    # All products: their operations at 50 TFLOP/s, where none is bound by memory.
    least = found["forward"].floors[0]
    assert least == pytest.approx(forward_flops(SIZES["small"], 4, 512) / 50e9, rel=0.02)
    said = str(estimate.sentence(p))
    assert "other numbers of kernels than the count (forward 157 for" in said
    right = [(phase, "", "elementwise", "x", one.counted, 1.0) for phase, one in found.items()]
    said = str(estimate.sentence(made((), ({}, right))))
    assert "has exactly the kernels of the count in every phase; products" in said
    # What libraries launch beside them is told apart: memsets by name, or by where they are.
    beside = [("forward", "ffn.w2", "copy", "rest", 12, 0.1),
              ("forward", "ln1", "copy", "rest", 3, 0.1),
              ("backward", "backward", "copy", "Memset", 5, 0.1)]  # fmt: skip
    said = str(estimate.sentence(made((), ({}, [*right, *beside]))))
    assert "in every phase, and beside them 20 memsets of workspaces, which libraries" in said
    unknown = [*right, ("forward", "ffn", "copy", "rest", 1, 0.1)]
    assert "(forward 609 for 608)" in str(estimate.sentence(made((), ({}, unknown))))
    # Of the products 327 are the model's.
    more = [*PLACED, ("backward", "ffn.w1", "matmul", "rest", 7, 1.0)]
    split = estimate.phases(made((), ({}, more)), "small")
    assert (split["forward"].split, split["backward"].split) == (0, 7)
    assert lines(estimate.table(p, "c", "tab-c"))["small", "optimizer"][1::2] == [
        "1", "0", "0", "50.0",
    ]  # fmt: skip


def test_the_second_profiler(made):
    slower = [(*k[:5], k[5] * (1.1 if k[2] == "softmax" else 1.0)) for k in STEP]
    p = made((), ({}, STEP), ({"profiler": "torch"}, slower))
    assert str(checks.witness(p)) == (
        "torch.profiler of the same steps, in another process: small at 512: the same number of "
        "kernels in every phase, class and part, 0.5% more kernel time, most apart in softmax "
        "(10.0%)."
    )
    p = made((), ({}, STEP), ({"profiler": "torch"}, STEP[:-1]))
    assert "another number of kernels" in str(checks.witness(p))
    both = [({"model": m, "profiler": by}, STEP) for m in ("2.7B", "small") for by in
            ("nsys", "torch")]  # fmt: skip
    assert [w.name for w in checks.witnesses(made((), *both))] == [
        "small at 512", "2.7B at 512",
    ]  # fmt: skip
    # Tables rest on Nsight's.
    assert p.share("small", 512, "train-step") == 0.6


def test_what_could_not_be_filed(made):
    said = str(checks.filed(made([row(), row(context=128, no_range_percent=1.25)])))
    assert "of any of 2 traces at most 0.5 % has a name that no rule knew, 0 % has" in said
    assert "1.2 % has a launch outside" in said and "too much" not in said
    name = "void at_cuda_detail::cub::detail::unique_by_key::DeviceUniqueByKeySweepKernel<Policy, i"
    rows = [row(note=f"no class: {name}; no class: mystery<4>"), row(context=128)]
    said = str(checks.filed(made(rows)))
    assert "`DeviceUniqueByKeySweepKernel` has a rule by now, and counts on these pages as " in said
    assert "embedding; the rows" in said and "mystery" not in said
    assert str(checks.filed(made([row(no_class_percent=3)]))).endswith("off by as much.")


def test_what_was_not_traced(made):
    refused = {**KEY, "phase": "step", "status": "oom", "note": "in step 0: much"}
    said, left = str(checks.refused(made([refused, row(context=128)]))).split("\n\n")
    assert said == "- small, 512 tokens, train-step, fp32, eager: oom (in step 0: much)"
    assert left == (
        "**Not measured yet**, of the steps that this chapter is about: small at 256 and 1,024 "
        "(plain); 2.7B at 128, 256, 512 and 1,024 (plain); small at 128, 256, 512 and "
        "1,024 (compiled); 2.7B at 128, 256, 512 and 1,024 (compiled); "
        "small at 512 (bf16); 2.7B at 512 (bf16); small at 512 (bf16, ours, compiled); 2.7B at 512 "
        "(bf16, ours, compiled)."
    )
    every = [row(model=m, context=c, **way) for m in checks.TRACED for c in (128, 256, 512, 1024)
             for way in WAYS.values()]  # fmt: skip
    assert str(checks.refused(made(every))) == "Every configuration that was tried has its trace."


def test_every_kernel_is_listed_and_adds_up(made):
    p = made((), ({}, STEP))
    said = str(listing.lists(p))
    assert said.count("::::{dropdown}") == 2 and "small, 512 tokens, plain" in said
    found = lines(listing.totals(p.of("small", 512), "c", "tab-c"), 3)
    assert found["backward", "matmul", "ffn.w1"] == ["248", "135", "38.6%"]
    assert len(found) == 11
    first = listing.tops(p.of("small", 512), "c", "tab-c").frame.iloc[0]
    assert list(first)[2:] == ["`gemm_c`", 218, "130", "596", "37.1%"]


def test_a_picture_without_its_run_is_refused(made, tmp_path):
    made((), ({}, STEP))
    runs = tmp_path / "measured" / "runs.csv"
    head, *_ = runs.read_text().splitlines()
    for file in tmp_path.glob("measured/*/*.csv"):
        file.unlink()
    runs.write_text(head + "\n")
    with pytest.raises(ReportError, match="is not in runs.csv"):
        Profile([tmp_path])


def test_published_counts_are_those_of_a_whole_forward(empty):
    """48 blocks of seven linear layers and the head: 337; 32 of them: 225."""
    assert (published.linear("xl25"), published.linear("2.7B")) == (337, 225)
    said = str(published.ranges(empty))
    assert "213 times" in said and "124 times" in said and "exactly the 337 linear layers" in said
    assert "37% of the forward's linear layers are filed under the backward" in said
    said = str(published.cut_short(empty))
    assert "65.6% of the timer's" in said and "148 calls, 65.8% of the model's 225" in said
    assert "large 107, xl (2025) 143, 2.7B 148 are neither" in said
    assert "0.35 times both" in str(published.softmax(empty))
    assert lines(published.table(empty, "c", "tab-c"))["small", "128"] == [
        "15.57", "18.382", "60", "5.00", "55 %", *["·"] * 5,
    ]  # fmt: skip
    assert lines(published.shares(empty, "c", "tab-c"), 1) == {
        ("products, inference",): ["85 %", "·"], ("products, whole step",): ["68 %", "·"],
    }  # fmt: skip


def test_published_figures_stand_beside_ours(made):
    at = {"context": 128, "model": "2.7B"}
    p = made([row("forward", 10.0, **at)], (at, STEP), (at | {"context": 256}, STEP))
    assert lines(published.table(p, "c", "tab-c"))["2.7B", "128"][5:] == [
        "10.0", "10.0", "85", "2.66", "55.0%",
    ]  # fmt: skip
    said = str(published.cut_short(p))
    assert "Ours of the same model has 85 calls of its top kernel, 55% of the kernel time." in said
    assert "0.35 times both, where kernels alone give 0.80 in 2.7B at 256 tokens" in str(
        published.softmax(p)
    )


def test_without_rows_each_part_says_so(empty):
    for say in (answer.sentence, answer.same_top, answer.not_products, answer.shift, checks.filed,
                softmax.sentence, timer.agreement, host.idling, host.issuing, checks.witness,
                host.graphs, host.queue, softmax.narrow, ways.sentence, fusing.fused,
                checks.refused, timer.perturbed, checks.alone, listing.lists,
                estimate.sentence):  # fmt: skip
        assert "**Not measured yet on an NVIDIA H200**" in str(say(empty)), say
    for table in (answer.tops, answer.rest, answer.moves, softmax.table, timer.forwards,
                  host.hosts, estimate.table, timer.every, ways.table, ways.tops,
                  fusing.between):  # fmt: skip
        assert "nothing measured yet" in str(table(empty, "c", "tab-c")), table
    for chart in (answer.shares(empty), answer.bar(empty, "small"), softmax.chart(empty),
                  softmax.roofline(empty), ways.chart(empty)):  # fmt: skip
        assert "not measured yet" in chart._repr_svg_()
    assert "nothing had been measured on another machine" in str(local.show(empty))


def test_the_pages_render_with_and_without_rows(made, shown_by, tmp_path):
    for page in ("profile", "profile-kernels"):
        assert any("Not measured yet" in cell for cell in shown_by(page, tmp_path / "none"))
    made([row(ms_timer=400.0), forward(512)], ({}, STEP), ({"profiler": "torch"}, STEP))
    for page in ("profile", "profile-kernels"):
        text = "".join(shown_by(page, tmp_path))
        assert "gemm_a" in text and "traces will follow" not in text


def test_charts_are_of_the_house(made):
    from a2lib.report import svg

    p = made((), ({}, STEP), ({"model": "2.7B"}, STEP))
    for chart in (answer.shares(p), answer.bar(p, "small"), softmax.chart(p), softmax.roofline(p)):
        text = chart._repr_svg_()
        assert svg.smallest_text(text) >= svg.LEAST_SIZE
    assert answer.shares(p)._repr_svg_().count("75 % matmul") == 2


def test_another_machine_is_in_its_own_section(synthetic, tmp_path):
    rows = [row("forward", 10.0, ms_timer=20.0), {**KEY, "phase": "step", "status": "oom"}]
    synthetic.by_hand(tmp_path, device="nvidia-l4", profile=rows)
    text = str(local.show(Profile([tmp_path])))
    assert "NVIDIA L4" in text and "| forward | 20.0 | 10.0 | 10.0 | 50% |" in text
    assert "| step | oom |" in text
