"""What the chapter on benchmarking says, by value: rows made by hand, in round milliseconds."""

import math

import pytest
from benchmark_rows import CEILING, first, lines, refused, steps, times, whole

from a2lib.report.chapters.benchmark import (
    Benchmark,
    answer,
    estimate,
    local,
    power,
    rest,
    speed,
    updates,
    warmup,
)
from a2lib.report.chapters.benchmark import first as apart
from a2lib.report.chapters.measured import spread
from a2lib.report.chapters.profile.rows import Profile
from a2lib.report.chapters.profile.ways import Way
from a2lib.report.tables import MISSING


@pytest.fixture
def empty(tmp_path):
    return Benchmark([tmp_path])


def test_the_answer_word_for_word(bench):
    measured = times(300, 600, 99) + whole(199, way="ours")
    assert str(answer.sentence(bench(benchmark=measured))) == (
        "**The answer.** One train-step of the 2.7B model, 512 tokens and a batch of 4, takes 1000 "
        "ms in plain fp32: forward 300 ms, backward 600 ms (2.00 times the forward), optimizer "
        "99.0 ms. In bf16 with our attention, compiled block by block and replayed from one CUDA "
        "graph, the same step takes 200 ms, 5.00 times as fast."
    )


def test_the_answer_is_of_the_largest_model_that_has_one(bench):
    measured = times(3, 6, 1, model="small") + refused() + times(30, 60, 9, model="large")
    said = str(answer.sentence(bench(benchmark=measured)))
    assert said.startswith("**The answer.** One train-step of the large model") and "100 ms" in said
    assert said.endswith(
        "**Not measured yet on an NVIDIA H200**: the same step in bf16, compiled and captured."
    )


def test_a_slower_captured_step_is_not_called_faster(bench):
    measured = times(10, 20, 9) + whole(79, way="ours")
    assert str(answer.sentence(bench(benchmark=measured))).endswith("80.0 ms, 2.00 times as long.")


def test_the_table_has_means_deviations_and_reasons(bench):
    measured = times(3, 6, 1, model="small", context=128) + refused(model="10B", context=128)
    shorter = times(50, 90, 1, model="10B", context=128, mode="forward-backward")
    shorter = [row for row in shorter if row["phase"] in ("forward", "backward", "step", "wall")]
    found = lines(answer.table(bench(benchmark=measured + shorter), "c", "tab-c"))
    assert found == {
        ("small", "128"): ["3.00 ± 1.0", "6.00 ± 1.0", "1.00 ± 1.0", "11.0 ± 1.0", "60.0"],
        ("10B", "128"): ["50.0 ± 1.0", "90.0 ± 1.0", "oom", "oom", MISSING],
    }


def test_what_did_not_fit_is_listed_once_with_its_reason(bench):
    measured = refused(model="10B", note="not tried: needs much") + times(1, 2, 3)
    assert str(answer.not_fitting(bench(benchmark=measured))) == (
        "- 10B, train-step at 512 tokens: out of memory (not tried: needs much)"
    )
    many = refused(model="10B", note="not tried: needs much", context=128)
    many += refused(model="10B", note="not tried: needs much")
    many += refused(model="10B", note="not tried: needs much", way="ours", capture="true")
    tried = "in warmup 0, forward: CUDA out of memory. Tried to allocate {} MiB of ..."
    for size, mode in ((72, "forward"), (90, "forward-backward")):
        many += refused(model="10B", context=1024, mode=mode, note=tried.format(size))
    assert str(answer.not_fitting(bench(benchmark=many))).splitlines() == [
        "- 10B, train-step at 128 and 512 tokens (3 configurations): out of memory (not tried: "
        "needs much)",
        "- 10B, forward and forward-backward at 1,024 tokens (2 configurations): out of memory (in "
        "its first forward)",
    ]
    late = "in warmup 4, backward: CUDA out of memory. Tried to allocate {} MiB"
    some = times(1, 2, 3, model="10B") + refused(
        model="10B", precision="bf16", capture="true", note=late.format(4)
    )  # fmt: skip
    some += refused(model="10B", precision="bf16", note=late.format(9))
    assert str(answer.not_fitting(bench(benchmark=some))) == (
        "- 10B, train-step at 512 tokens (captured bf16 with eager attention and bf16 with eager "
        "attention): out of memory (in warmup 4, backward)"
    )
    held = refused(note="in capture: CUDA out of memory. Tried to allocate 2 MiB", mode="forward")
    said = str(answer.not_fitting(bench(benchmark=held)))
    assert said == "- 2.7B, forward at 512 tokens: out of memory (when captured)"
    fits = answer.not_fitting(bench(benchmark=times(1, 2, 3)))
    assert str(fits) == "Every configuration that was measured fits."


def test_a_configuration_that_was_stored_in_part_is_told_as_far_as_it_goes(bench):
    rows = times(300, 600, 99)
    said = str(answer.sentence(bench(benchmark=[r for r in rows if r["phase"] != "backward"])))
    assert "1000 ms in plain fp32: forward 300 ms, optimizer 99.0 ms. **Not" in said
    alone = [r for r in rows if r["phase"] in ("optimizer", "wall")]
    assert str(answer.spreads(bench(benchmark=alone))).endswith("512 tokens (1.0%).")
    wall = bench(benchmark=[r for r in rows if r["phase"] == "wall"])
    assert "takes 1000 ms in plain fp32. **Not" in str(answer.sentence(wall))


def test_spreads_and_the_ratio(bench):
    measured = times(100, 200, 100) + times(100, 250, 100, model="small", context=128)
    measured[0] |= {"ms_std": 7}
    assert str(answer.spreads(bench(benchmark=measured))) == (
        "The standard deviation is above 2% of the mean in 1 of 6 phases; the widest is the "
        "forward of 2.7B at 512 tokens (7.0%). By medians backward takes 2.00 to 2.50 times "
        "its forward, where the products alone would make it two."
    )


def test_the_spread_is_drawn_by_value(bench):
    measured = times(100, 200, 10, std=2, model="small") + refused(model="small", context=1024)
    measured += times(100, 200, 10, std=12, mode="forward", model="2.7B")
    figure = answer.spread(bench(benchmark=measured)).figure
    assert [ax.get_title() for ax in figure.axes] == [
        "forward", "backward", "optimizer", "train-step",
    ]  # fmt: skip
    said = [[t.get_text() for t in ax.texts if t.get_text() not in ("", "–")]
            for ax in figure.axes]  # fmt: skip
    assert said == [["2.0", "12.0"], ["1.0", "6.0"], ["20.0", "120.0"], ["0.6"]]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["small", "2.7B"]
    assert sum(t.get_text() == "–" for t in figure.axes[3].texts) == 7


def test_host_and_gpu_apart(bench):
    small = {"model": "small", "context": 128}
    measured = times(10, 20, 9, host=36, **small) + whole(12, **small)
    measured += times(100, 200, 99, host=36) + whole(398)
    measured += times(8, 16, 5, host=30, way="ours", **small) + whole(4, way="ours", **small)
    measured += times(9, 18, 12, way="autocast", **small)
    b = bench(benchmark=measured)
    assert str(answer.launch_bound(b)) == (
        "The host needs longer to issue the step than the GPU to run it in 1 of 2 train-steps of "
        "plain fp32 (small at 128) and in 1 of 1 train-steps of bf16 with our attention and "
        "compiled blocks (small at 128). **Not measured yet on an NVIDIA H200**: the other ways of "
        "1 of the 2 sizes and contexts whose step fits."
    )
    found = lines(answer.ways(b, "c", "tab-c"))
    assert found["small", "128"] == [
        "40.0", "36.0", "12.0", "40.0", "30.0", "30.0", "4.00", "5.00", "8.00",
    ]  # fmt: skip
    assert found["2.7B", "512"] == ["400", "36.0", "398"] + [MISSING] * 6
    # A step that was measured in plain fp32 alone is in the table of every size.
    only = bench(benchmark=times(1, 2, 3, host=2))
    assert not len(answer.ways(only, "c", "tab-c").frame)


def test_a_forward_that_the_host_holds_up_is_told_apart(bench):
    measured = times(100, 200, 100, std=1) + times(10, 15, 5, model="small", context=128)
    for row in measured:
        if row["phase"] == "forward":
            row["ms_host"] = 9.5
    said = str(answer.spreads(bench(benchmark=measured)))
    assert "above 2% of the mean in 3 of 6 phases" in said
    assert said.endswith(
        "In 1 of these 2 steps (small at 128) the host takes 90% of the forward's time or more: "
        "that time is the host's, and 3 of the 3 wide phases are in these steps. In the others "
        "backward takes 2.00 times its forward."
    )


def test_the_answer_says_what_limits(bench):
    measured = times(300, 600, 99) + whole(199, way="ours")
    measured += times(5, 10, 4, model="small", way="ours") + whole(4, model="small", way="ours")
    said = str(answer.sentence(bench(benchmark=measured, ceiling=CEILING)))
    assert "the GPU limits it. The small model is limited by the host: launched kernel by" in said
    assert said.endswith("kernel that step takes 20.0 ms, replayed 5.00 ms.")


def aims(peer, ours, captured, host=(None, None), model="2.7B"):
    """Compiled steps of one model by wall time, with PyTorch's attention and with ours, and ours
    captured; times() and whole() make wall 1 ms more than the step."""
    third = [(ms - 1) / 3 for ms in (peer, ours)]
    return [
        *times(*[third[0]] * 3, host=host[0], way="peer", model=model),
        *times(*[third[1]] * 3, host=host[1], way="ours", model=model),
        *whole(captured * 1.1 - 1, way="peer", model=model),
        *whole(captured - 1, way="ours", model=model),
    ]


def test_the_landing_page_s_steps(bench):
    small = {"model": "small"}
    measured = times(1, 2, 3, **small) + times(4, 2, 1, way="peer", **small)
    measured += whole(5, way="ours", **small) + whole(6, way="peer", **small)
    b = bench(benchmark=measured + times(1, 1, 1, way="ours", **small) + whole(2, **small))
    found = {row[0]: row[1:5] for row in speed.results(b, "c", "tab-c").frame.values.tolist()}
    assert found["small"] == ["**6.00 ms**", "7.00 ms", "8.00 ms", "7.00 ms"]
    assert found["2.7B"] == [MISSING] * 4
    assert sorted(speed.behind_results(b)["ms"]) == [6, 7, 7, 8]


def test_our_attention_beside_pytorch_s_own(bench):
    measured = aims(100, 150, 50, host=(90, 140), model="small") + aims(400, 390, 380)
    for row in measured:
        if row["model"] == "small" and row["phase"] == "forward":
            row["ms_host"] = row["ms"]
    measured += times(50, 40, 9, way="autocast") + times(40, 30, 9, way="eager ours")
    b = bench(benchmark=measured)
    assert str(speed.beside(b)) == (
        "Replayed, where nothing but the GPU counts, a compiled step with our attention is faster "
        "than with PyTorch's in 2 of 2 cases and takes 0.91 of its time. Launched kernel "
        "by kernel ours is slower, by more than the spread of the steps, in 1 of 2 (small at 512), "
        "in all of which the forward, with which a step begins, takes the host's time: issuing the "
        "step with our operator took it 50.0 ms longer. In eager mode the step with ours takes "
        "0.80 of the time of the one with attention by its definition."
    )
    found = lines(speed.table(b, "c", "tab-c"))
    assert found["small", "512"] == ["100", "150", "1.50", "55.0", "50.0", "0.91"] + [MISSING] * 3
    assert found["2.7B", "512"][6:] == ["100", "80.0", "0.80"]


def test_times_of_two_runs_are_not_compared(bench, synthetic, tmp_path):
    measured = aims(100, 150, 50)
    other = synthetic.RUN.replace("nvidia-h200", "cpu")
    synthetic.by_hand(tmp_path, device="cpu")
    for row in measured:
        if row["attention"] == "flash":
            row["run"] = other
    b = bench(benchmark=measured)
    assert str(speed.beside(b)).startswith("**Not measured yet")
    assert speed.aimed(b, "2.7B") is None and speed.aimed(b, "small") == 8


def test_targets_met_and_missed(bench):
    measured = aims(30, 20, 7, model="small") + aims(100, 90, 80, model="xl25")
    measured += aims(200, 195, 190, host=(20, 20))
    measured += times(50, 40, 9, way="autocast") + times(140, 30, 9, way="eager ours")
    measured += refused(model="10B", way="ours", capture="true")
    b = bench(benchmark=measured, ceiling=CEILING)
    floor = estimate.floors(b, "2.7B", "bf16", True)["total"].ms
    said = str(speed.reached(b))
    assert said.startswith(
        "Met: small with 7.00 ms (at most 8.00). Missed: xl (2025) with 80.0 ms (at most 72.0), "
        "2.7B with 190 ms (at most 150) and 2.7B in eager mode with 180 ms (at most 100)."
    )
    assert f"it is {190 / floor - 1:.0%} above. Its plain compiled step is the GPU's" in said
    least = estimate.floors(b, "2.7B", "bf16", True)
    products, update = least["products"].ms, least["optimizer"].ms
    assert (
        f"The floor of 2.7B is {floor:.1f} ms (products at the measured rate {products:.1f}, all "
        f"else at the measured bandwidth {floor - products:.1f}, of which AdamW's bytes take "
        f"{update:.1f}), {floor / 150:.0%} of its target"
    ) in said
    assert "quicker host" not in said
    found = speed.targets(b, "c", "tab-c").frame.set_index("model")
    assert list(found.loc["small"][:5]) == ["8.00", "7.00", "met", "20.0", "65%"]
    assert list(found.loc["2.7B"][:3]) == ["150", "190", "missed"]
    assert found.loc["10B", "verdict"] == "does not fit"


def test_a_target_that_the_host_sets_is_called_so(bench):
    b = bench(benchmark=aims(200, 195, 100, host=(150, 150), model="large"), ceiling=CEILING)
    assert str(speed.reached(b)).endswith(
        "A quicker host would ask for more where the time of the plain compiled step is the host's "
        "(large 200 ms, replayed 110)."
    )


def test_an_eager_step_that_is_slower_is_named(bench):
    measured = aims(100, 90, 50) + times(50, 40, 9, way="autocast")
    held = times(150, 40, 9, host=190, way="eager ours")
    assert str(speed.beside(bench(benchmark=measured + held))).endswith(
        "definition; 1 of these 1 times is the host's. By more than the spread of the steps it is "
        "slower in 2.7B at 512, where its time is the host's."
    )
    said = str(speed.beside(bench(benchmark=measured + times(150, 40, 9, way="eager ours"))))
    assert said.endswith("it is slower in 2.7B at 512.")


def test_a_target_below_the_floor_is_called_so(bench):
    measured = aims(100, 195, 190)
    b = bench(benchmark=measured, ceiling=CEILING)
    assert estimate.floors(b, "2.7B", "bf16", True)["total"].ms > 75
    said = str(speed.reached(b))
    assert said.startswith("None is met. Missed: 2.7B with 190 ms (at most 75.0).")
    assert said.endswith(
        "above its target: with fp32 weights, and each kernel after the one before, no step "
        "reaches it on this GPU."
    )


def test_the_rest_of_a_step_by_captured_modes(bench, tmp_path, monkeypatch):
    measured = whole(200, way="ours") + whole(60, way="ours", mode="forward")
    measured += times(1, 2, 40, way="autocast") + times(1, 2, 44, way="ours")
    b = bench(benchmark=measured, ceiling=CEILING)
    assert rest.passes(b, "2.7B") == {"forward": 60, "backward": 100, "optimizer": 40}
    least = {n: f.ms for n, f in estimate.floors(b, "2.7B", "bf16", True, by="phase").items()}
    said = str(rest.sentence(b, Profile([tmp_path])))
    assert said.endswith("what lies between them, these rows do not say.")
    beyond = 200 - least["total"]
    assert said.startswith(f"Beyond its floor the captured step takes {beyond:.0f} ms (2.7B).")
    assert f"has {(40 - least['optimizer']) / beyond:.0%} of that" in said
    later = 100 - least["backward"] - least["loss"]
    assert f"2.7B {60 - least['forward']:.1f} and {later:.1f} ms" in said
    idle = estimate.idle(b, "2.7B")["total"]
    share = idle / (60 - least["forward"] + later)
    assert f"tiles explain {idle:.2f} ms (2.7B), {share:.0%}: " in said
    assert "Not measured" not in said
    way = Way(9, 80, 60, least["optimizer"] + 5, 0, (70, 50), 9)
    monkeypatch.setattr(rest, "measured", lambda p, m, w: way if m == "2.7B" else None)
    assert str(rest.sentence(b, None)).endswith(
        "Beyond their floors the two take 10.0 and 10.0 ms in 2.7B, of the latter 5.00 AdamW's."
    )
    found = rest.table(b, "c", "tab-c").frame.set_index("model").loc["2.7B"]
    assert list(found)[1::2][:1] == ["200"] and found["share"] == f"{least['total'] / 200:.0%}"


def test_captured_modes_of_two_commits_make_no_pass(bench, synthetic, tmp_path):
    other = synthetic.RUN.replace("nvidia-h200", "cpu")
    synthetic.by_hand(tmp_path, device="cpu")
    measured = whole(200, way="ours") + whole(60, way="ours", mode="forward")
    measured = [{**row, "run": other} if row["mode"] == "forward" else row for row in measured]
    b = bench(benchmark=measured + times(1, 2, 40, way="autocast"))
    assert len(rest.passes(b, "2.7B")) == 3  # of two runs
    b.runs.loc[other, "git"] = "later"
    assert rest.passes(b, "2.7B") == {"optimizer": 40}


def test_the_rest_of_a_step_as_launched(bench, tmp_path):
    held = times(5, 10, 4, host=19, way="ours", model="small")
    held += whole(10, way="ours", model="small") + times(1, 2, 3, model="small")
    free = times(60, 90, 42, host=20, way="ours") + whole(190, way="ours") + times(9, 9, 41)
    free += [{**free[0], "phase": "loss", "ms": 2, "ms_mean": 2}]
    b = bench(benchmark=held + free, ceiling=CEILING)
    assert rest.passes(b, "small") == {"optimizer": 3}
    assert rest.passes(b, "2.7B") == {"forward": 60, "backward": 92, "optimizer": 41}
    said = str(rest.sentence(b, Profile([tmp_path])))
    assert said.endswith("forward and backward of small apart, by the GPU.")


def test_this_library_s_adamw_by_value(bench):
    narrow, beside = {"precision": "bf16_weights"}, {"mode": "overlapped-step"}

    def four(model, *ms):
        ways = ({}, beside, narrow, {**narrow, **beside})
        return [row for each, over in zip(ms, ways, strict=True) if each
                for row in whole(each - 1, way="ours", model=model, **over)]  # fmt: skip

    measured = aims(100, 90, 80, model="xl25")[:-2] + four("xl25", 80, 76, 70, 64)
    measured += aims(100, 195, 190)[:-2] + four("2.7B", 100, 110, 90, None)
    measured += four("small", 7, None, None, None)
    b = bench(benchmark=measured, ceiling=CEILING)
    said = str(updates.sentence(b))
    assert said.startswith(
        "Of the captured step with PyTorch's AdamW and fp32 weights it takes with AdamW beside the "
        "backward 0.95 to 1.10 (slower: 2.7B), with 16-bit weights 0.88 to 0.90 and with both "
        "0.80. 16-bit weights spare 2.7B 10.0 ms, where its floor is lower by "
    )
    assert (
        " The target that is missed above is met so by xl (2025) with 64.0 ms (at most 72.0; "
        "both). Missed all the same: 2.7B with 90.0 ms (at most 75.0; 16-bit weights). The 90.0 ms "
    ) in said
    updated = estimate.floors(b, "xl25", "bf16_weights", True)["optimizer"].ms
    assert f"backward hides {6 / updated:.0%} of the least that the optimizer takes. The" in said
    least = estimate.floors(b, "2.7B", "bf16_weights", True)
    products, others = least["products"].ms, least["total"].ms - least["products"].ms
    idle = estimate.idle(b, "2.7B")["total"]
    rest_of = 90 - products - others - idle
    hidden = estimate.hidden(b, "2.7B", "bf16_weights")
    assert said.endswith(
        f"with 16-bit weights are products at the best rate ({products:.1f} ms, "
        f"{products / 90:.0%}), all else at the measured bandwidth ({others:.1f} ms, "
        f"{others / 90:.0%}), at least what tiles leave idle ({idle:.2f} ms, {idle / 90:.0%}) and "
        f"what these rows do not explain ({rest_of:.2f} ms, {rest_of / 90:.0%}). The first "
        f"two are its floor, {least['total'].ms:.1f} ms, {least['total'].ms / 75:.0%} of the "
        f"target; with the optimizer wholly beside the backward it would be {hidden:.1f} ms, "
        f"{hidden / 75:.0%}. For the target the overlap has to hide 15.0 ms, "
        f"{15 / least['optimizer'].ms:.0%} of the least that the optimizer takes."
    )
    assert 0 < rest_of < 9 and 0 < idle < 9 and hidden < least["total"].ms
    found = updates.table(b, "c", "tab-c").frame.set_index("model")
    assert list(found.index) == ["xl (2025)", "2.7B"]
    assert list(found.loc["xl (2025)"][:5]) == ["80.0", "76.0", "70.0", "64.0", "0.80"]
    assert list(found.loc["2.7B"][:5]) == ["100", "110", "90.0", MISSING, "0.90"]
    assert list(found.loc["2.7B"][5:7]) == [f"{least['total'].ms:.1f}", f"{hidden:.1f}"]


@pytest.mark.parametrize(
    ("ms", "ends"), [(85, "it hides 5.00 ms."), (89, "it hides 1.00 ms."), (93, "hides nothing.")]
)
def test_what_the_overlap_hides_of_a_missed_step(bench, ms, ends):
    narrow = {"way": "ours", "precision": "bf16_weights"}
    measured = aims(100, 195, 99)[:-2] + whole(98, way="ours") + whole(89, **narrow)
    measured += whole(ms - 1, mode="overlapped-step", **narrow)
    said = str(updates.sentence(bench(benchmark=measured, ceiling=CEILING)))
    assert said.endswith(ends) and "Missed all the same: 2.7B with" in said
    assert ("the two steps are level for 2.7B." in said) == (ms == 89)
    assert ("Running beside the backward hides" in said) == (ms < 90)


def test_an_update_that_spares_nothing_is_not_praised(bench):
    narrow = {"way": "ours", "precision": "bf16_weights"}
    measured = whole(79, way="ours") + whole(89, **narrow)
    measured += whole(99, mode="overlapped-step", **narrow)
    said = str(updates.sentence(bench(benchmark=measured, ceiling=CEILING)))
    assert said.endswith("16-bit weights 1.12 (slower: 2.7B) and with both 1.25 (slower: 2.7B).")


def test_the_answer_names_the_fastest_way(bench):
    measured = times(300, 600, 99) + whole(199, way="ours")
    over = {"way": "ours", "precision": "bf16_weights"}
    both = whole(149, mode="overlapped-step", **over)
    said = str(answer.sentence(bench(benchmark=measured + whole(159, **over) + both)))
    assert said.endswith("With weights in 16 bits and AdamW beside the backward it takes 150 ms.")
    said = str(answer.sentence(bench(benchmark=measured + whole(159, **over))))
    assert said.endswith(" With weights in 16 bits it takes 160 ms.")
    assert "AdamW" not in str(answer.sentence(bench(benchmark=measured + whole(209, **over))))


def test_compiled_steps_of_two_commits_are_told_apart(bench, synthetic, tmp_path):
    other = synthetic.RUN.replace("nvidia-h200", "cpu")  # by its name the earlier one
    synthetic.by_hand(tmp_path, device="cpu")
    plain = times(10, 20, 9, 5, way="ours") + whole(10, way="ours")
    old = times(10, 20, 9, 5, way="ours", context=128) + whole(10, way="ours", context=128)
    b = bench(benchmark=plain + [{**row, "run": other} for row in old])
    b.runs.loc[other, "git"] = b.runs.loc[synthetic.RUN, "git"]
    assert "commit" not in str(answer.launch_bound(b))
    b.runs.loc[other, "git"] = "earlier"
    git = b.runs.loc[synthetic.RUN, "git"]
    assert str(answer.launch_bound(b)).endswith(
        f"of more than one commit, `earlier` at 128 and `{git}` at 512 tokens, so that along the "
        "contexts of a model code and machine may differ too."
    )


def test_this_library_s_adamw_of_another_run_is_not_compared(bench, synthetic, tmp_path):
    synthetic.by_hand(tmp_path, device="cpu")
    other = synthetic.RUN.replace("nvidia-h200", "cpu")
    over = whole(60, way="ours", precision="bf16_weights")
    b = bench(benchmark=whole(70, way="ours") + [{**row, "run": other} for row in over])
    assert str(updates.sentence(b)).startswith("**Not measured yet")


def test_another_machine_is_shown_as_such(synthetic, tmp_path):
    measured = times(3, 6, 1, model="tiny", context=16)
    b = Benchmark([synthetic.by_hand(tmp_path, device="cpu", benchmark=measured)])
    assert not len(b.table)
    shown = str(local.show(b))
    assert "tiny sizes" in shown
    assert "| 3.00 ± 1.0 | 6.00 ± 1.0 | 1.00 ± 1.0 | 11.0 ± 1.0 |" in shown


def test_without_rows_every_result_says_that_it_is_not_measured(empty, tmp_path):
    told = [answer.sentence, answer.spreads, answer.not_fitting, answer.launch_bound]
    told += [warmup.sentence, apart.sentence, estimate.sentence, estimate.beside]
    told += [speed.beside, speed.reached, updates.sentence, power.sentence]
    told += [lambda b: rest.sentence(b, Profile([tmp_path]))]
    for sentence in told:
        assert str(sentence(empty)).startswith("**Not measured yet on an NVIDIA H200**")
    tables = (answer.table, answer.ways, warmup.table, apart.table, estimate.table)
    tables += (speed.table, speed.targets, rest.table, updates.table, power.table)
    for table in tables:
        assert not len(table(empty, "c", "tab-c").frame)
    assert "nothing had been measured" in str(local.show(empty))
    assert warmup.chart(empty)._repr_svg_()


@pytest.mark.parametrize("measured", [False, True])
def test_every_cell_of_the_page_runs(synthetic, tmp_path, shown_by, measured):
    if measured:
        made = {"benchmark": times(300, 600, 99) + whole(199, way="ours") + refused(model="10B"),
                "benchmark_steps": steps([100, 20] + [10] * 8, 0), "ceiling": CEILING,
                "benchmark_first": first("nothing", 110) + first("product", 105)}  # fmt: skip
        synthetic.by_hand(tmp_path, **made)
    shown = shown_by("benchmark", tmp_path)
    assert len(shown) >= 20
    text = "\n".join(shown)
    assert ("One train-step of the 2.7B model" in text) == measured
    assert ("takes 100 ms more than a steady one" in text) == measured
    assert ("that an estimate needs" in text) != measured


def test_a_mean_with_its_deviation():
    assert spread(12.34, math.nan) == "12.3" and spread(12.34, 0.456) == "12.3 ± 0.46"
