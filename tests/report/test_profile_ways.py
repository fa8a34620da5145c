"""What the profile chapter says of compiled steps and of bf16, by value: traces made by hand."""

import functools

import pytest
from profile_rows import SCORES, STEP, chapter, forward, lines, row

from a2lib.report import svg
from a2lib.report.chapters.profile import answer, estimate, fusing, softmax, ways
from a2lib.theory.roofline import compiled_step, eager_step
from a2lib.theory.transformer import SIZES

COMPILED = {"compile": "blocks"}
NARROW = {"precision": "bf16"}
OURS = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
# Of 350 ms in STEP 210 are products, 50 AdamW's, 5 copies.
INDUCTOR = [
    ("forward", "forward", "matmul", "gemm_a", 109, 70.0),
    ("forward", "forward", "softmax", "triton_per_fused__softmax_arange_exp_3", 12, 3.0),
    ("forward", "forward", "fused", "triton_poi_fused__unsafe_view_mul_silu_7", 12, 2.0),
    ("forward", "forward", "fused", "triton_poi_fused_add_clone_flip_mul_transpose_2", 24, 4.0),
    ("forward", "forward", "fused", "triton_per_fused_add_mean_mul_pow_rsqrt_0", 24, 1.0),
    ("backward", "backward", "matmul", "gemm_c", 218, 140.0),
    ("optimizer", "optimizer", "optimizer", "adam", 1, 60.0),
]
AUTOCAST = [
    ("forward", SCORES, "matmul", "nvjet_a", 12, 2.0),
    ("forward", "attn.attention.values", "matmul", "nvjet_b", 12, 2.0),
    ("forward", "attn.attention.softmax", "softmax", "soft", 12, 16.0),
    ("forward", "attn.attention.softmax", "copy", "cast", 12, 9.0),
    ("forward", "ffn.w1", "copy", "cast", 12, 11.0),
    ("backward", "ffn.w1", "matmul", "nvjet_c", 218, 17.0),
    ("optimizer", "optimizer", "optimizer", "adam", 1, 50.0),
]
FUSED = [
    ("forward", "forward", "matmul", "nvjet_a", 50, 10.0),
    ("forward", "forward", "attention", "forward_kernel", 12, 5.0),
    ("forward", "forward", "fused", "triton_poi_fused_to_copy_7", 12, 5.0),
    ("optimizer", "optimizer", "optimizer", "adam", 1, 50.0),
]
# 2 * 8192**3 operations at 500 TFLOP/s.
TENSOR = {"operation": "matmul", "dtype": "bf16", "size": 8192, "ms": 2 * 8192**3 / 500e9}


@pytest.fixture
def made(synthetic, tmp_path):
    return functools.partial(chapter, synthetic, tmp_path)


@pytest.fixture
def every(made):
    rows = [row(**way) for way in ({}, COMPILED, NARROW, OURS)]
    return made(rows, ({}, STEP), (COMPILED, INDUCTOR), (NARROW, AUTOCAST), (OURS, FUSED),
                (COMPILED | {"mode": "forward"}, INDUCTOR[:5]))  # fmt: skip


def test_what_each_way_changes(every):
    said = str(ways.sentence(every))
    assert said.startswith(
        "- Compiled, in fp32: products take what they took, everything else 50% of its time, and "
        "the step has 79% of the kernels. By count, what is no product has "
    )
    assert (
        "- In bf16: products are 10.0 times as fast. Everything else takes 0.61 times as "
        "long: the operands of every product are cast, and copies take 4.0 times as long."
    ) in said
    assert (
        "everything that is no product takes 64% of what it takes in bf16 alone, in 27% of the "
        "kernels. AdamW, which is not compiled and stays in fp32, is 71% of the kernel time, of "
        "the plain step 14%."
    ) in said
    assert said.endswith(
        "So the products' share of a step, 60% of the kernel time when plain, is 75% compiled, 20% "
        "in bf16, and 21% in bf16 with our attention and compiled."
    )


def test_the_answer_names_the_ways_and_the_timer(made):
    step, rows = ({}, STEP), [row(), forward(512)]
    p = made(rows, step, (COMPILED, INDUCTOR), (NARROW, AUTOCAST))
    said = str(answer.sentence(p)).rpartition("\n\n")[2]
    assert said == (
        "Of the kernel time of a step products take 75% in small where it is compiled; 20% in "
        "small where it is in bf16. A forward takes in a trace what the timer says, to within 2%, "
        "in 1 of 1 configurations."
    )
    slower = forward(128, ms_timer=7.0, ms_traced=10.1)
    p = made([*rows, slower], step, ({"context": 128}, STEP))
    assert str(answer.sentence(p)).endswith(
        "in 1 of 2 configurations; in the others the host is the limit, and slower where it is "
        "traced."
    )
    p = made([*rows, {**slower, "ms_traced": 7.0}], step, ({"context": 128}, STEP))
    assert str(answer.sentence(p)).endswith("in 1 of 2 configurations.")


def test_of_two_models_the_order_is_said(made):
    traces = [(key | {"model": model}, step) for model in ("small", "2.7B")
              for key, step in (({}, STEP), (COMPILED, INDUCTOR), (NARROW, AUTOCAST),
                                (OURS, FUSED))]  # fmt: skip
    said = str(ways.sentence(made((), *traces)))
    assert said.startswith("Numbers are of small and 2.7B, in this order.")
    assert "is 75% and 75% compiled" in said


def test_products_of_another_time_are_not_called_the_same(made):
    slower = [(*k[:5], 2 * k[5]) if k[2] == "matmul" else k for k in INDUCTOR]
    p = made((), ({}, STEP), (COMPILED, slower), (NARROW, AUTOCAST), (OURS, FUSED))
    assert "products take 200% of their time, everything else" in str(ways.sentence(p))


def test_the_ways_beside_their_floors(every):
    found = lines(ways.table(every, "c", "tab-c"))
    assert [key[0] for key in found] == list(ways.WAYS)
    cells = found["compiled", "small"]
    assert (cells[0], cells[1], cells[3], cells[5]) == ("400", "210", "70.0", "75%")
    one = ways.measured(every, "small", ways.COMPILED)
    count = [k for k in compiled_step(SIZES["small"], 4, 512, "fp32") if not k.flops]
    assert one.moved == sum(k.count * (k.read + k.written) for k in count)
    # At 4 TB/s.
    assert cells[4] == ways.style.digits(one.moved / 4e9)
    # No ceiling of bf16 is measured here.
    assert found["bf16", "small"][2] == found["bf16", "small"][4] == "·"


def test_the_top_kernel_of_each_way(every):
    found = lines(ways.tops(every, "c", "tab-c"))
    assert found["bf16", "small"] == ["`cast`", "copy", "24", "50.0%"]
    assert found["compiled", "small"] == ["`gemm_a`", "matmul", "109", "87.5%"]


def test_what_lies_between_two_products(every):
    found = lines(fusing.between(every, "c", "tab-c"))
    assert list(found) == [("small", what) for what in fusing.BETWEEN]
    # STEP has 24 masks and 12 softmaxes in 20 ms, INDUCTOR one kernel a block in 3.
    cells = found["small", "scale, mask, softmax"]
    assert (cells[0], cells[2], cells[3], cells[5]) == ("3", "20.0", "1", "3.00")
    scores = 4 * 12 * 512**2 * 12
    assert float(cells[4]) == pytest.approx(8 * scores / 1e9, rel=0.01)  # once in and once out
    assert [found["small", what][5] for what in fusing.BETWEEN] == ["3.00", "2.00", "4.00", "1.00"]
    said = str(fusing.fused(every))
    assert "of small 4 kernels of a block become 6; of all blocks, " in said
    assert "and 25.0 ms become 10.0." in said


def test_every_kernel_between_products_is_counted_once():
    """By the names in theory/roofline.py."""
    for step in (eager_step, compiled_step):
        names = {k.name for k in step(SIZES["small"], 4, 512, "fp32")
                 if k.phase == "forward" and k.count >= 12 and not k.flops}  # fmt: skip
        for name in names:
            held = [what for what, (_, counted, _) in fusing.BETWEEN.items()
                    if fusing.re.search(counted, name)]  # fmt: skip
            assert len(held) == 1, (name, held)


def test_the_softmax_beside_products_in_bf16(made, every):
    said = str(softmax.narrow(every))
    assert said.startswith(
        "**With products in bf16**, 512 tokens: in small the products take 4.00 ms in place of "
        "20.0, the softmax 16.0 in place of 16.0, 4.00 times as long as both, and the cast to fp32 "
        "before it 9.00. Autocast"
    )
    assert said.endswith("half the bytes.")
    assert lines(softmax.table(every, "c", "tab-c"))["small", "512, bf16"][:5] == [
        "2.00", "2.00", "0", "16.0", "4.00",
    ]  # fmt: skip
    p = made([row(), row(**NARROW)], ({}, STEP), (NARROW, AUTOCAST))
    p.tflops["bf16"] = 500.0
    # 4 * 64 operations a score at 500 TFLOP/s; 2 bytes in, 2 out of each, and 8 rows of 64 over.
    scores = 4 * 12 * 12 * 512**2
    flops, moved = 256 * scores / 500e9, 2 * (2 * scores + 4 * scores / 512 * 64) / 4e9
    said = str(softmax.narrow(p))
    assert f"products {softmax.style.digits(flops)} ms by operations and " in said
    assert f"{softmax.style.digits(moved)} by bytes, softmax" in said
    assert said.endswith("memory now binds them too, and the ratio of times is one of bytes.")


def test_the_count_holds_in_bf16(made):
    step = eager_step(SIZES["small"], 4, 512, "bf16")
    right = [(phase, "", "elementwise", "x", sum(k.count for k in step if k.phase == phase), 1.0)
             for phase in ("forward", "loss", "backward", "optimizer")]  # fmt: skip
    p = made((), ({}, STEP), (NARROW, [*right, ("forward", "", "copy", "Memset", 3, 0.1)]))
    assert str(estimate.sentence(p)).endswith(
        f"the count has more, {sum(k.count for k in step):,} in small, and the traces have exactly "
        "those too, beside memsets."
    )
    p = made((), ({}, STEP), (NARROW, right[:-1] + [("optimizer", "", "optimizer", "x", 7, 1.0)]))
    assert str(estimate.sentence(p)).endswith("the numbers of small differ from the count.")


def test_the_chart_is_of_the_house(every):
    text = ways.chart(every)._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE
    assert "bf16, ours," in text and "small, 512 tokens" in text
