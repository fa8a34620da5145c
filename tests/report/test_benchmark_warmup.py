"""Warm-up, the estimate and published figures in the chapter on benchmarking, by value."""

import re
import statistics
from collections import Counter
from types import SimpleNamespace

import pytest
from benchmark_rows import CEILING, first, lines, refused, steps, times, whole

from a2lib.experiments.benchmark.configurations import REPEATS, firsts
from a2lib.report import svg
from a2lib.report.chapters.benchmark import Benchmark, estimate, published, warmup
from a2lib.report.chapters.benchmark import first as apart
from a2lib.report.tables import MISSING


def test_a_step_is_drawn_beside_its_floor(bench, tmp_path):
    measured = times(300, 650, 49, model="2.7B") + whole(112, way="ours")
    measured += times(60, 40, 19, way="ours") + refused(model="10B")
    b = bench(benchmark=measured, ceiling=CEILING)
    [ax] = estimate.chart(b).figure.axes
    drawn = {(round(x, 3), round(y, 1)) for line in ax.lines for x, y in line.get_xydata()}
    least = [estimate.floors(b, "2.7B", *how)["total"].ms for how in (("fp32", False),
                                                                      ("bf16", True))]  # fmt: skip
    for ms, y in ((1000, 1.2), (113, 0.8), (120, 0.8), (least[0], 1.2), (least[1], 0.8)):
        assert (round(ms, 3), y) in drawn, ms
    said = [t.get_text() for t in ax.texts if t.get_text()]
    assert said == ["does not fit", "1000", "113", "120"]
    assert [t.get_text() for t in ax.get_yticklabels()][:2] == ["10B", "2.7B"]
    text = estimate.chart(b)._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE
    assert "not measured yet" in estimate.chart(Benchmark([tmp_path / "empty"]))._repr_svg_()


def test_warmup_by_value(bench):
    measured = steps([100, 20] + [10] * 8, 0) + steps([100] + [10] * 10, 1)
    measured += steps([100, 20] + [10.1] * 10, 2) + steps([100, 20, 10, 10, 10] + [10] * 10, 5)
    measured += steps([800] + [100] * 9, 0, "2.7B")
    b = bench(benchmark_steps=measured)
    assert str(warmup.sentence(b)) == (
        "The first step of a process takes 8.0 (2.7B) to 10.0 (small) times the median of its last "
        "5. The mean is within 2% of that after five steps of warm-up for 0 of 1 models after 0, "
        "1 of 1 models after 1 and 1 of 1 models after 2 steps. Of what the first step takes more "
        "the forward has 25%. The second step takes 1.00 to 2.00 times the median of the later "
        "ones of its process, and for no model is it more than 2% longer in each process (in one "
        "alone for small): one step of warm-up is enough."
    )
    found = lines(warmup.table(b, "c", "tab-c"))
    assert found["small", "0"] == ["5.00 ± 7.1", MISSING, MISSING, "20.0 ± 28"]
    assert found["small", "5"] == ["2.50 ± 0", MISSING, MISSING, "10.0 ± 0"]


def test_a_second_step_that_is_slow_in_every_process_is_named(bench):
    slow = steps([100, 20] + [10] * 8, 0) + steps([100, 12] + [10] * 13, 5)
    fast = steps([100, 20] + [10] * 8, 0, "2.7B") + steps([100] + [10] * 14, 5, "2.7B")
    said = str(warmup.sentence(bench(benchmark_steps=slow + fast)))
    assert said.endswith(
        "The second step is still longer than the median of the later ones, in each process, for "
        "small."
    )


def test_noise_is_told_from_warmup_by_who_holds_the_step_up(bench):
    walls = [100] + [10, 12] * 7
    measured = [row for model in ("small", "2.7B") for warmup in (0, 5)
                for row in steps(walls, warmup, model)]  # fmt: skip
    host = times(10, 20, 9, host=36, model="small", context=128)
    host += whole(12, model="small", context=128)
    other = times(10, 20, 9, host=36, context=128) + whole(38, context=128)
    said = str(warmup.sentence(bench(benchmark_steps=measured, benchmark=host + other)))
    wide = statistics.stdev([10, 12] * 5) / 11
    assert said.endswith(
        f"after five steps the standard deviation is {wide:.1%} for small, whose steps the host "
        f"holds up at 128 tokens, and {wide:.1%} for 2.7B, whose steps it does not."
    )
    said = str(warmup.sentence(bench(benchmark_steps=measured, benchmark=host)))
    assert "holds up" not in said


def test_means_after_fewer_steps_are_of_the_longest_process(bench):
    longest = [100, 20, 12, 10, 10] + [10] * 10
    b = bench(benchmark_steps=steps(longest, 5))
    assert warmup.samples(b, "small", 1, "wall") == longest[1:11]
    assert warmup.samples(b, "small", 2, "wall") == longest[2:12]
    assert warmup.samples(b, "small", 5, "wall") == longest[5:]
    assert warmup.samples(b, "small", 0, "wall") == []  # has a process of its own
    own = bench(benchmark_steps=steps(longest, 5) + steps([7] * 11, 1))
    assert warmup.samples(own, "small", 1, "wall") == [7] * 10
    found = lines(warmup.table(b, "c", "tab-c"))
    assert list(found) == [("small", "1"), ("small", "2"), ("small", "5")]
    assert found["small", "1"][-1] == "11.2 ± 3.2"


def test_every_step_is_drawn_and_what_is_averaged(bench):
    measured = steps([100, 20] + [10] * 8, 0) + steps([100, 20, 10, 10, 10] + [10] * 10, 5)
    measured += steps([800] + [100] * 9, 0, "2.7B")
    b = bench(benchmark_steps=measured)
    chart = warmup.chart(b)
    above, below = chart.figure.axes
    lines_drawn = [list(line.get_ydata()) for line in above.lines if len(line.get_ydata())]
    assert sorted(line[:2] for line in lines_drawn) == [[100, 20], [100, 20], [800, 100]]
    assert sorted(map(len, lines_drawn)) == [10, 10, 15]
    points = [point for dots in below.collections for point in dots.get_offsets().tolist()]
    ratios = Counter((round(x), y) for x, y in points)  # by place of the warm-up: 0, 1, 2, 5
    of_five = {(1, 2): 1, (1, 1): 9, (2, 1): 10, (3, 1): 10}  # steps 1 to 10, 2 to 11, 5 to 14
    assert ratios == {(0, 10): 1, (0, 2): 1, (0, 1): 8} | of_five  # 2.7B has no five to go by
    text = chart._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE
    assert re.findall(r"#[0-9a-f]{6}\b", re.sub(r"--\w+:#[0-9a-f]{6}", "", text)) == []
    alone = warmup.chart(bench(benchmark_steps=steps([800] + [100] * 9, 0, "2.7B")))
    assert [t.get_text() for t in alone.figure.axes[1].texts] == ["not measured yet"]


def test_the_first_step_taken_apart(bench):
    measured = [row for repeat, more in enumerate((0, 50, -1))
                for row in first("nothing", 1010 + more, repeat=repeat)]  # fmt: skip
    measured += first("product", 910) + first("block", 210) + first("memory", 60)
    loaded = first("modules", 2010)
    measured += [*loaded, loaded[0] | {"part": "context", "ms": 3000}]
    done = {"product": 80, "block_first": 160, "block_second": 10, "memory": 20}
    prepared = first("memory", 60)[:1]
    measured += [prepared[0] | {"part": part, "ms": ms} for part, ms in done.items()]
    measured += first("nothing", 9010, way="ours") + first("cached", 3010, way="ours")
    b = bench(benchmark_first=measured)
    assert str(apart.sentence(b)) == (
        "- The first step of small takes 1000 ms more than a steady one, of which kernels and "
        "autograd 700 ms, the largest part (done beforehand, the product takes 80.0 ms, a block's "
        "first step 150 more than its second and the memory 20.0: 250 ms together, 25% of it).\n"
        "- With its blocks compiled that of small takes 9.00 s "
        "more than a steady one, of which code on disk spares 6.00 s.\n\nWith every kernel loaded "
        "at once the context of small takes 3.00 s in place of 0.300 and its first step 2.00 s "
        "more than a steady one in place of 1.00. So it spares the first step nothing. Our "
        "reading, not tested: a library's kernels are loaded with the library's own first call, "
        "cuBLAS's within that step. Processes that are prepared alike differ by up to 51.0 ms. "
        "**Not measured yet**, of the preparations: `nothing`, `product`, `block`, `memory` and "
        "`modules` of 2.7B."
    )
    larger = [row | {"model": "2.7B"} for row in measured if row["compile"] == "none"]
    whole = str(apart.sentence(bench(benchmark_first=measured + larger)))
    assert whole.endswith("**Not measured yet**: 20 of the 36 processes of the sweep.")
    table = apart.table(b, "c", "tab-c").frame.set_index("model")
    plain = dict(table.loc["small"])
    assert plain == {
        "steady step": "10.0", "first step: more": "1000", "cuBLAS": "100",
        "kernels and autograd": "700", "allocator": "150", "rest": "50.0",
        "compiling": MISSING, "context (before)": "300", "all loaded: context": "3000",
        "first step: more ": "2000",
    }  # fmt: skip
    assert table.loc["small, compiled", "compiling"] == "6000"
    assert table.loc["small, compiled", "cuBLAS"] == MISSING


def test_the_processes_are_those_that_the_sweep_has(bench):
    assert apart.REPEATS == REPEATS["cuda"]
    measured = [row for one, prepared in firsts("cuda") for repeat in range(apart.REPEATS)
                for row in first(prepared, 110, repeat=repeat, model=one.model,
                                 way="plain" if one.compile == "none" else "ours")]  # fmt: skip
    said = str(apart.sentence(bench(benchmark_first=measured)))
    assert "Not measured" not in said
    said = str(apart.sentence(bench(benchmark_first=measured[:-1])))
    assert "Not measured" not in said  # its steady part alone is missing
    said = str(apart.sentence(bench(benchmark_first=measured[:-4])))
    assert said.endswith("**Not measured yet**: 1 of the 36 processes of the sweep.")


def test_loading_every_kernel_that_spares_something_is_not_explained_away(bench):
    loaded = first("modules", 60)
    measured = first("nothing", 110) + loaded + [loaded[0] | {"part": "context", "ms": 3000}]
    said = str(apart.sentence(bench(benchmark_first=measured + first("product", 100))))
    assert "0.0500 s more than a steady one in place of 0.100. **Not measured yet**" in said


def test_the_largest_part_is_of_those_that_are_known(bench):
    b = bench(benchmark_first=first("nothing", 1010) + first("product", 910))
    said = str(apart.sentence(b))
    assert "of which cuBLAS 100 ms, the largest part known.\n\n**Not measured yet**" in said
    assert said.endswith("and `modules` of 2.7B; `nothing` and `cached` of small, compiled.")


def test_one_model_without_warm_up_is_named_once(bench):
    said = str(warmup.sentence(bench(benchmark_steps=steps([100] + [10] * 9, 0))))
    assert said.startswith("The first step of a process takes 10.0 (small) times the median")


def test_processes_without_times_have_their_reason(bench):
    assert "Not measured yet on" in str(warmup.missing(bench()))
    every = [row for model in ("small", "medium", "large", "xl25", "2.7B") for w in (0, 5)
             for row in steps([10] * 10, w, model)]  # fmt: skip
    assert (
        str(warmup.missing(bench(benchmark_steps=every)))
        == "Every process that was run gave its times."
    )
    gone = {"status": "oom", "note": "out of it. GPU 0 has a total", "ms": "", "n": ""}
    some = [row | gone if row["warmup"] == 5 else row for row in every
            if row["model"] != "2.7B" or row["warmup"] < 5]  # fmt: skip
    memory = [row | gone for row in first("memory", 1, model="2.7B")]
    lost = first("cached", 9, way="ours") + first("cached", 9, repeat=1, way="ours")
    lost[-3:] = [row | gone | {"status": "error", "note": "E: no cache"} for row in lost[-3:]]
    said = str(warmup.missing(bench(benchmark_steps=every, benchmark_first=lost)))
    assert said == (
        "- first step of small, compiled, after `cached` (1 of 2 processes): error (E: no cache)"
    )
    said, left = str(warmup.missing(bench(benchmark_steps=[r for r in some if r["model"] in (
        "small", "2.7B")], benchmark_first=memory))).split("\n\n")  # fmt: skip
    assert said.splitlines() == [
        "- small after 5: oom (out of it)", "- first step of 2.7B after `memory`: oom (out of it)",
    ]  # fmt: skip
    assert left.startswith("**Not measured yet**, of the processes: medium after 0, medium after 5")
    assert left.endswith("xl (2025) after 5 and 2.7B after 5 steps of warm-up.")


def test_a_part_that_spares_nothing_is_negative(bench):
    b = bench(benchmark_first=first("nothing", 110) + first("product", 115))
    assert apart.table(b, "c", "tab-c").frame.loc[0, "cuBLAS"] == "−5.00"


def test_the_estimate_is_of_the_measured_ceilings(bench):
    b = bench(ceiling=CEILING)
    parts = estimate.floors(b, "2.7B", "fp32", False)
    # Products and attention's, at 50 TFLOP/s: 3 forwards of 14.2 TFLOP.
    assert parts["total"].flops == pytest.approx(42.6e12, rel=2e-3)
    assert parts["products"].ms > 3 * 14.2e12 / 50e12 * 1e3 * 0.95
    said = str(estimate.sentence(b))
    assert "50.0 TFLOP/s in fp32, 4.00 TB/s" in said and "the arithmetic binds" in said
    assert "has 42.6 TFLOP" in said
    share = parts["products"].ms / parts["total"].ms
    assert f"{share:.0%} of it in matrix products" in said


def test_the_measured_time_stands_beside_its_floor(bench):
    floor = estimate.floors(bench(ceiling=CEILING), "2.7B", "fp32", False)["total"].ms
    double = bench(ceiling=CEILING, benchmark=whole(2 * floor))
    assert str(estimate.beside(double)).startswith("The floor is 50% of the GPU's measured")
    table = estimate.table(double, "c", "tab-c").frame.set_index("model")
    assert table.loc["2.7B", "share"] == "50%" and table.loc["small", "share"] == MISSING
    wrong = bench(ceiling=CEILING, benchmark=whole(floor / 2))
    assert str(estimate.beside(wrong)) == (
        "Below its floor, so that the floor or the time is wrong: 2.7B."
    )


def test_published_figures_stand_beside_ours(bench):
    b = bench(benchmark=times(100, 300, 9, model="small"))
    found = lines(published.table(b, "c", "tab-c"))
    assert found["small", "512"] == [
        "27.2", "45.3 ± 0.82", "100 ± 1.0", "54.2", "90.6 ± 1.2", "300 ± 1.0",
    ]  # fmt: skip
    assert found["2.7B", "1,024"] == [MISSING, "oom", MISSING] * 2
    warmed = published.warmups(bench(benchmark_steps=steps([9] * 11, 1)), "c", "tab-c").frame
    mine = warmed[(warmed["model"] == "small") & (warmed["w"] == 1)].iloc[0]
    assert mine["RTX 5090"] == "33.5 ± 44" and mine["H200"] == "2.25 ± 0"
    assert len(b.reference.drop_duplicates(["device", "source"])) == 4


def test_published_forwards_as_rates(bench):
    said = str(published.rates(bench()))
    # Of all their forwards the fastest, by operations over the printed time.
    assert "30.1 TFLOP/s on the H800 PCIe and 16.5 TFLOP/s on the unnamed GPU" in said
    assert said.endswith("ours with and without TF32 beside them.")
    # Products of a forward are 14.2 TFLOP.
    both = times(284, 9, 9) + times(71, 9, 9, precision="tf32")
    assert "runs at 50.0 in fp32 and at 200 in TF32." in str(published.rates(bench(benchmark=both)))


def test_what_published_deviations_say_of_slow_steps(bench):
    b = bench()
    slow = [400.0] + [100.0] * 9
    given = {"ms": statistics.mean(slow), "ms_std": statistics.stdev(slow)}
    alone = SimpleNamespace(**given)
    assert published._excess(alone) == pytest.approx(300)
    assert published._without_one(alone) == pytest.approx(100)
    said = str(published.slow_steps(b))
    assert "53.3 ms (large, 53.2), 64.8 ms (xl (2025), 64.5) and 80.6 ms (2.7B, 81.6)" in said
    assert "574 to 598 ms more, for models one of which has 3.5 times the parameters" in said
    assert "It leaves 27.8 ms (small, 20.1) and 39.6 ms (medium, 32.4), too much" in said
    assert said.endswith(
        "small has 32.5 ± 39 ms after them, which one step of 124 ms more explains."
    )
    said = str(published.first_of_all(b))
    assert "41.6 ± 75 ms for small, its first model, and deviations of 3% to 8%" in said
    assert "xl (2025) takes 186 times its forward. Weights and gradients are 16.0 GB" in said
