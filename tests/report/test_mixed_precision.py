"""The mixed-precision chapter by value: rows made by hand, whose sentences a person can check."""

import ast
import math
import re
from fractions import Fraction

import pandas as pd
import pytest

from a2lib.measure.sections import SECTIONS
from a2lib.paths import ROOT
from a2lib.report import svg
from a2lib.report.chapters.mixed_precision import Mixed, dtypes, gains, layernorm, speed, sums
from a2lib.report.chapters.mixed_precision.rows import MISSING
from a2lib.report.tables import MISSING as BLANK
from a2lib.theory.floating import decimal

PAGE = ROOT / "book" / "mixed_precision.md"


@pytest.fixture
def empty(tmp_path):
    return Mixed([tmp_path])


@pytest.fixture
def mixed(synthetic, tmp_path):
    """A Mixed of rows made by hand: mixed(device=..., accumulation=[...], ...)."""

    def make(device="nvidia-h200", **sections):
        sections = {n: [{"note": "", **row} for row in rows] for n, rows in sections.items()}
        return Mixed([synthetic.by_hand(tmp_path, device=device, **sections)])

    return make


def loop_row(loop, computed, **over):
    return {"sum_dtype": loop.sum, "addend_dtype": loop.addend, "cast": str(loop.cast).lower(),
            "terms": loop.terms, "addend": loop.step, "computed": computed, **over}  # fmt: skip


def cells(table, **where):
    """The lines of a Table whose columns have these texts."""
    frame = table.frame
    for column, text in where.items():
        frame = frame[frame[column] == text]
    return frame


def page_cells():
    text = PAGE.read_text(encoding="utf-8")
    for cell in re.findall(r"```\{code-cell\} ipython3\n(.*?)```", text, re.S):
        cell = re.sub(r"^---\n.*?\n---\n", "", cell, flags=re.S)
        yield re.sub(r"^:tags:.*\n", "", cell, flags=re.M).replace(
            "from myst_nb import glue", "glued = {}\nglue = lambda name, text, display: "
            "glued.__setitem__(name, text)",
        )  # fmt: skip


def shown(monkeypatch, root):
    """The page's cells run on the data of ``root``: what each shows, and what was glued."""
    monkeypatch.setenv("A2LIB_DATA", str(root))
    names, texts = {}, []
    for cell in page_cells():
        *body, last = ast.parse(cell).body
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            texts.append(str(eval(compile(ast.Expression(last.value), "cell", "eval"), names)))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return texts, names["glued"]


def test_the_page_stands_without_rows(monkeypatch, tmp_path):
    texts, glued = shown(monkeypatch, tmp_path)
    quoted = set(re.findall(r"\{glue:text\}`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert quoted <= set(glued) and len(quoted) > 10
    everything = "\n".join(texts)
    assert "nan" not in everything.lower().split() and "None" not in everything
    assert everything.count(MISSING) > 20


def test_the_page_with_rows_names_their_device_and_source(monkeypatch, mixed, tmp_path):
    mixed(
        accumulation=[loop_row(loop, decimal(loop.result())) for loop in sums.LOOPS],
        autocast_dtypes=autocast_rows("fp16") + autocast_rows("bf16"),
        layernorm=[norm_row("eps", "1e-08", "fp16", "0", "1e-08")],
    )
    texts, _ = shown(monkeypatch, tmp_path)
    everything = "\n".join(texts)
    assert "14 of 14 loops run on the NVIDIA H200 gave what is predicted" in everything
    assert "Observed on the NVIDIA H200, under autocast to fp16" in everything
    for section in ("accumulation", "autocast_dtypes", "layernorm"):
        assert re.search(rf"measured/{section}/nvidia-h200.csv", everything)


def test_every_anchor_of_the_registry_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    mine = [s for s in SECTIONS.values() if "mixed_precision" in s.pages]
    answers = [a for s in mine for a in s.answers if "mixed_precision" in a.label]
    assert len(answers) == 4
    for answer in answers:
        assert f"({answer.anchor})=\n## {answer.title}\n" in text


def test_the_table_of_loops_says_whether_a_machine_agrees(mixed):
    right, wrong = sums.of("bf16", "bf16"), sums.of("fp16", "fp16")
    made = mixed(accumulation=[
        loop_row(right, "4"), loop_row(wrong, "9.5"),
        loop_row(sums.of("fp32", "fp32"), "", status="error", note="broken"),
    ])  # fmt: skip
    table = sums.table(made, "T", "tab-t")
    at = {(r.sum, r.loop): r for r in table.frame.rename(columns={"NVIDIA H200": "h"}).itertuples()}
    assert at["1,000 × 0.01", "`bf16 += bf16`"].h == "equal"
    assert at["1,000 × 0.01", "`fp16 += fp16`"].h == "9.5"
    assert at["1,000 × 0.01", "`fp32 += fp32`"].h == "error"
    assert at["10,000 × 0.001", "`bf16 += bf16`"].h == MISSING
    assert str(sums.confirmed(made)) == (
        "1 of 2 loops run on the NVIDIA H200 gave what is predicted (1 differ)."
    )


def test_the_error_has_two_parts():
    for loop in sums.LOOPS:
        error, addend, summing = sums.parts(loop)
        assert error == addend + summing == loop.result() - 10
    loop = sums.of("fp32", "bf16")
    assert sums.parts(loop)[2] == 0
    # 0.01 in bf16 is 41 / 4096, and 41,000 / 4096 is 10 and 5 / 512.
    assert loop.held == Fraction(41, 4096) and sums.parts(loop)[0] == Fraction(5, 512)


def test_bf16_is_behind_fp16_in_every_sum_as_the_page_says():
    for terms in (1000, 10_000):
        for sum_ in ("low", "fp32"):
            error = {
                low: abs(sums.parts(sums.of(low if sum_ == "low" else sum_, low, terms))[0])
                for low in ("fp16", "bf16")
            }
            assert error["bf16"] > error["fp16"]


def test_the_walk_says_what_an_addition_adds():
    frame = sums.walk(sums.of("bf16", "bf16"), "W", "tab-w").frame
    last = frame.iloc[-1].tolist()
    assert last == ["4 to 8", "0.03125", "650", "0", "nothing: less than half a distance"]
    before = frame.iloc[-2].tolist()
    # 0.015625 / 0.010009765625 is 1.561.
    assert before[:4] == ["2 to 4", "0.015625", "128", "0.015625"]
    assert before[4] == "one distance, 56.10% too much"


def test_the_stalls_in_words():
    text = str(sums.stalls())
    start = "The fp16 sum of 1,000 × 0.01 would stall at 32, which it does not reach;"
    assert text.startswith(start)
    assert (
        "that of 1,000 × 0.01 in bf16 stalls at 4 after 350 additions: numbers there are 0.03125 "
        "apart, and 0.010009765625 is less than half of it"
    ) in text
    assert decimal(sums.of("bf16", "bf16").partial_sums()[348]) != "4"
    assert decimal(sums.of("bf16", "bf16").partial_sums()[349]) == "4"


def test_published_sums_are_compared_to_the_digits_printed(empty):
    text = str(sums.published(empty))
    assert re.match(r"3 public writeups print 17 results .*; 17 of them", text)
    answers = empty.reference["answer"]
    empty.reference["answer"] = answers.where(answers != "9.9531", "9.9533")
    assert "; 15 of them are" in str(sums.published(empty))


def test_the_figure_is_readable_on_a_phone_and_the_same_twice():
    drawn = sums.figure()._repr_svg_()
    assert svg.smallest_text(drawn) >= svg.LEAST_SIZE
    assert drawn == sums.figure()._repr_svg_()
    assert "fp32, fp16" in drawn  # they end together above


def autocast_rows(low, **over):
    return [
        {"autocast": low, "quantity": name, "observed": over.get(name, dtypes.expected(name, low))}
        for name in dtypes.RULES
    ]


def test_the_six_dtypes_are_the_observed_ones(mixed, empty):
    said = "parameters fp32, output of `fc1` fp16, output of `ln` fp32, logits fp16, loss fp32, "
    assert said in str(dtypes.sentence(empty)) and MISSING in str(dtypes.sentence(empty))
    made = mixed(autocast_dtypes=autocast_rows("fp16", **{"ln output": "fp16"}))
    assert str(dtypes.sentence(made)) == (
        "Observed on the NVIDIA H200, under autocast to fp16: parameters fp32, output of `fc1` "
        "fp16, output of `ln` fp16, logits fp16, loss fp32, gradients of the parameters fp32."
    )
    assert "do not hold for ln output." in str(dtypes.differences(made))


def test_devices_that_follow_the_lists_are_said_to(mixed):
    made = mixed(autocast_dtypes=autocast_rows("fp16") + autocast_rows("bf16"))
    text = str(dtypes.differences(made))
    assert text == "On the NVIDIA H200 all 26 dtypes are those of the lists."


def test_a_cpu_is_shown_beside_and_is_not_the_answer(mixed):
    made = mixed(device="cpu", autocast_dtypes=autocast_rows("fp16", **{"ln output": "fp16"}))
    assert "output of `ln` fp32" in str(dtypes.sentence(made))
    line = cells(dtypes.table(made, "fp16", "D", "tab-d"), tensor="ln output").iloc[0]
    assert (line["by the lists"], line["CPU"]) == ("fp32", "fp16")
    assert "since autocast has other lists for the CPU" in str(dtypes.differences(made))


def test_wrong_published_dtypes_are_named(empty, mixed):
    text = str(dtypes.wrong(empty))
    assert "2 differ: the writeup on H800 PCIe has fp32 for the logits, where the lists" in text
    assert "the writeup on A100 40 GB has fp16 for the loss, where the lists have fp32" in text
    made = mixed(autocast_dtypes=autocast_rows("fp16", **{"loss: cross-entropy": "fp16"}))
    assert "4 differ" in str(dtypes.wrong(made)) and "we observe fp16" in str(dtypes.wrong(made))
    frame = dtypes.published(empty, "P", "tab-p").frame
    assert sum(frame.map(lambda text: "**" in text).sum()) == 2


def norm_row(quantity, setting, dtype, computed, truth, **over):
    return {"quantity": quantity, "setting": setting, "dtype": dtype, "features": 2560,
            "computed": computed, "truth": truth, **over}  # fmt: skip


def test_the_parts_of_layer_norm_by_value(mixed):
    made = mixed(layernorm=[
        norm_row("variance, one pass", "mean 100", "fp16", "0", "1"),
        norm_row("variance, one pass", "mean 300", "fp16", "nan", "1"),
        norm_row("variance, one pass", "mean 100", "bf16", "1.09", "1"),
        norm_row("variance, one pass in fp32", "mean 100", "fp16", "1.01", "1"),
        norm_row("variance, one pass in fp32", "mean 300", "fp16", "1.2", "1"),
        norm_row("variance, two passes", "mean 100", "fp16", "1.01", "1"),
        norm_row("mean of squares", "scale 300", "fp16", "inf", "90000"),
        norm_row("variance of the stored input", "mean 300", "bf16", "1.5", "1.2"),
        norm_row("eps", "1e-08", "fp16", "0", "1e-08"),
        norm_row("eps", "1e-05", "fp16", "1.001e-05", "1e-05"),
        norm_row("variance, two passes", "mean 100", "fp16", "9", "1", features=16),
    ])  # fmt: skip
    assert str(layernorm.sentence(made)) == (
        "On the NVIDIA H200: the variance in one pass, $E[x^2] - E[x]^2$, is wrong in fp16 for "
        "mean 100 and mean 300; the variance in two passes is right in all three dtypes; the mean "
        "of squares is wrong in fp16 for scale 300."
    )
    assert str(layernorm.repaired(made)).startswith("Of the 2 variances that one pass gets wrong")
    assert "or bf16, 1 are right when" in str(layernorm.repaired(made))
    # Numbers of bf16 from 256 to 512 are 2 apart.
    assert "bf16, whose numbers there are 2 apart, by 25.0 %" in str(layernorm.stored(made))
    assert str(layernorm.eps(made)).endswith("Of those tried 1e-08 became 0 and 1e-05 did not.")
    lines = cells(layernorm.table(made, "L", "tab-l"), quantity="variance, one pass")
    line = lines[lines["input"] == "mean 100"].iloc[0]
    assert line.tolist()[2:] == ["1", "–", "**0**", "1.09"]


def test_the_limits_are_arithmetic():
    frame = layernorm.limits("L", "tab-l").frame.set_index("dtype")
    # sqrt(65504) is 255.9; 2^(11/2) is 45.3, 2^(8/2) is 16.
    assert frame.loc["fp16", "squares overflow above"] == "256"
    assert list(frame["one pass fails at a mean above, in σ"]) == ["4096", "45", "16"]
    assert list(frame["a sum of ones stalls at"]) == ["16777216", "2048", "256"]


def step(model, precision, phase, ms, host=0.1, **over):
    return {"model": model, "context": 512, "batch": 4, "mode": "train-step", "status": "ok",
            "precision": precision, "attention": "eager", "compile": "none", "capture": "false",
            "warmup": 5, "phase": phase, "ms": ms, "ms_host": host, "run": "one",
            **over}  # fmt: skip


@pytest.fixture
def timed(empty):
    """Two sizes in fp32 and bf16, one in TF32, and rows that must not be taken for them."""
    rows = [
        step("small", "fp32", "forward", 10.0), step("small", "bf16", "forward", 8.0, host=7.5),
        step("2.7B", "fp32", "forward", 300.0), step("2.7B", "tf32", "forward", 100.0),
        step("2.7B", "bf16", "forward", 50.0),
        step("2.7B", "bf16", "forward", 1.0, attention="flash"),
        step("2.7B", "bf16", "forward", 1.0, compile="blocks"),
        step("2.7B", "bf16", "forward", 1.0, batch=1),
        step("small", "bf16", "forward", 1.0, capture="true"),
        step("small", "bf16", "forward", 1.0, warmup=0),
        step("small", "fp32", "forward", 99.0, mode="forward-backward"),
        step("10B", "fp32", "forward", None, host=None, status="oom"),
        step("xl25", "fp32", "forward", None, host=None, status="oom"),
        step("xl25", "fp32", "forward", 40.0, mode="forward"),
        step("xl25", "bf16", "forward", 20.0, mode="forward"),
    ]  # fmt: skip
    empty.steps = pd.DataFrame(rows).astype({"ms": float, "ms_host": float})
    empty.runs = pd.DataFrame({"git": ["a", "b"]}, index=["one", "other"])
    return empty


def test_whole_models_as_called_by_value(timed):
    table = speed.table(timed, "T", "tab-t")
    assert cells(table, model="small").iloc[0].tolist()[:6] == [
        "small", "512", "10.0", BLANK, "*8.00*", "1.25×",
    ]  # fmt: skip
    assert cells(table, model="2.7B").iloc[0].tolist()[2:6] == ["300", "100", "50.0", "6.00×"]
    # Where a step does not fit, the forward alone is compared with the forward alone.
    assert cells(table, model="xl (2025)").iloc[0].tolist()[2:6] == ["40.0", BLANK, "20.0", "2.00×"]
    assert not len(cells(table, model="10B"))
    assert str(speed.hosts(timed)) == (
        "As called in bf16, the host takes 90% of the time or more in 1 of 3 rows (small): there "
        "products still faster would gain nothing."
    )
    timed.steps.loc[timed.steps["ms"] == 8.0, ["ms", "ms_host"]] = [16.0, 16.0]
    assert str(speed.hosts(timed)).endswith("gain nothing, and bf16 is slower than fp32 in 1 rows.")


def test_a_host_that_waits_for_a_full_queue_does_not_set_the_time(timed):
    """It took no fewer launches a tenth of that at another context."""
    rows = [step("large", "fp32", "forward", 100.0, host=95.0),
            step("large", "bf16", "forward", 30.0, host=9.0)]  # fmt: skip
    timed.steps = pd.DataFrame(rows)
    fp32 = next(timed.steps.itertuples())
    assert not speed.of_host(timed.steps, fp32)
    timed.steps.loc[1, "ms_host"] = 29.0
    assert not speed.of_host(timed.steps, fp32)
    timed.steps.loc[1, "ms_host"] = 60.0
    assert speed.of_host(timed.steps, fp32)


def replays(model, times):
    """Rows of captured forwards and forward-backwards, from precision -> (one, the other)."""
    return [
        step(model, precision, "step", ms, mode=mode, capture="true")
        for precision, pair in times.items()
        for mode, ms in zip(("forward", "forward-backward"), pair, strict=True)
    ]


def test_gains_are_the_gpu_s(timed):
    assert gains.times(timed)["2.7B", 512, "forward"] == {"fp32": 300, "tf32": 100, "bf16": 50}
    assert ("small", 512, "forward") not in gains.times(timed)  # the host's, in bf16
    said = str(gains.trend(timed))
    assert said.startswith(
        "In the GPU's own time bf16 gains over fp32 at 512 tokens: forward from 2.00× "
        "(xl (2025)) to 6.00× (2.7B), growing with every size. **Not measured yet on an NVIDIA "
        "H200**: the GPU's own time in each precision, of small, medium, large, xl (2025), 2.7B "
        "and 10B."
    )
    rows = replays("small", {"fp32": (8, 24), "tf32": (4, 12), "bf16": (2, 4)})
    rows += replays("2.7B", {"fp32": (280, 840), "bf16": (40, 120)})
    timed.steps = pd.concat([timed.steps, pd.DataFrame(rows)], ignore_index=True)
    assert gains.times(timed)["small", 512, "backward"] == {"fp32": 16, "tf32": 8, "bf16": 2}
    assert gains.of_pass(gains.times(timed), 512, "forward") == {"small": 4, "xl25": 2, "2.7B": 7}
    said = str(gains.trend(timed))
    assert "forward from 4.00× (small) to 7.00× (2.7B), not growing with every size; back" in said
    assert "backward from 8.00× (small) to 7.00× (2.7B), not growing with every size." in said
    assert said.endswith("of medium, large, xl (2025) and 10B.")
    table = gains.table(timed, "G", "tab-g")
    assert cells(table, model="small").iloc[0].tolist()[2:] == [
        "replay", "8.00", "4.00", "2.00", "2.00×", "4.00×",
        "16.0", "8.00", "2.00", "2.00×", "8.00×",
    ]  # fmt: skip
    largest = cells(table, model="xl (2025)").iloc[0].tolist()
    assert largest[2:6] == ["as called", "40.0", BLANK, "20.0"]
    assert cells(table, model="10B").iloc[0].tolist()[2:] == [BLANK] * 11
    # What was tried and does not fit is no gap.
    large = replays("10B", {"fp32": (1200, 3600), "bf16": (150, 0)})
    large[-1] |= {"status": "oom", "ms": float("nan")}
    timed.steps = pd.concat([timed.steps, pd.DataFrame(large)], ignore_index=True)
    said = str(gains.trend(timed))
    assert "10B has no time of `forward-backward` in bf16, captured (oom). **Not" in said
    # The other precision is shown all the same, and what fits is told beside it.
    more = replays("10B", {"tf32": (200, 800), "bf16": (100, 300)})
    more = more[:2] + [row | {"attention": "flash", "compile": "blocks"} for row in more[2:]]
    timed.steps = pd.concat([timed.steps, pd.DataFrame(more)], ignore_index=True)
    assert cells(gains.table(timed, "G", "tab-g"), model="10B").iloc[0].tolist()[2:] == [
        "replay", "1200", "200", "150", "6.00×", "8.00×", "2400", "600", BLANK, "4.00×", BLANK,
    ]  # fmt: skip
    assert (
        "captured (oom). With our attention and compiled blocks they fit, and a replay of both "
        "takes 300 ms, in fp32 with attention by its definition 3600. **Not"
    ) in str(gains.trend(timed))
    assert gains.of_pass(gains.times(timed), 512, "backward").keys() == {"small", "2.7B"}
    assert said.endswith("of medium, large and xl (2025).")
    assert gains.times(timed)["10B", 512, "forward"] == {"fp32": 1200, "tf32": 200, "bf16": 150}
    # Of two commits, a difference is none of a pass.
    timed.steps.loc[timed.steps["mode"] == "forward-backward", "run"] = "other"
    assert ("small", 512, "backward") not in gains.times(timed)


def test_a_measured_gain_stands_beside_the_estimated_one(timed):
    assert "Not measured yet" in str(gains.against_estimate(timed))
    timed.ceiling_rows = Mixed([ROOT / "data"]).ceiling_rows
    ms = speed.estimate(timed, "2.7B", 512)
    text = str(gains.against_estimate(timed))
    assert f"2.7B at 512: 6.00× measured, {ms['fp32'] / ms['bf16']:.2f}× estimated" in text


def test_gains_are_drawn_measured_and_estimated(timed):
    rows = replays("small", {"fp32": (8, 24), "tf32": (4, 12), "bf16": (2, 4)})
    timed.steps = pd.concat([timed.steps, pd.DataFrame(rows)], ignore_index=True)
    timed.ceiling_rows = Mixed([ROOT / "data"]).ceiling_rows
    [ax] = gains.chart(timed).figure.axes
    lines = [list(line.get_ydata()) for line in ax.lines[:-1]]  # the last is the line at 1
    estimated = [speed.estimate(timed, m, 512) for m in speed.MODELS]
    assert lines[3] == [ms["fp32"] / ms["bf16"] for ms in estimated]
    tf32, bf16, backward = (dict(zip(speed.MODELS, lines[i], strict=True)) for i in (1, 4, 5))
    assert (tf32["small"], tf32["2.7B"], bf16["small"], bf16["xl25"]) == (2, 3, 4, 2)
    assert backward["small"] == 8 and all(math.isnan(backward[m]) for m in speed.MODELS[1:])
    text = gains.chart(timed)._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE and "bf16: forward, estimated" in text
    timed.steps, timed.ceiling_rows = timed.steps.iloc[:0], timed.ceiling_rows.iloc[:0]
    assert "not measured yet" in gains.chart(timed)._repr_svg_()


def test_the_estimate_by_hand(mixed):
    # A matmul of 1000 in 0.02 ms is 100 TFLOP/s, in 0.002 ms 1000; a copy of 1e9 bytes in 1 ms
    # moves 2 TB/s.
    made = mixed(ceiling=[
        {"operation": "matmul", "dtype": "fp32", "size": 1000, "ms": 0.02, "n": 1},
        {"operation": "matmul", "dtype": "bf16", "size": 1000, "ms": 0.002, "n": 1},
        {"operation": "copy", "dtype": "bf16", "size": 10**9, "ms": 1, "n": 1},
    ])  # fmt: skip
    shape = speed.SIZES["small"]
    u, f, scores = 2048 * 768, 2048 * 3072, 4 * 12 * 512**2
    moved = 4 * 12 * (20 * u + 5 * f + 12 * scores)
    assert speed.elementwise_bytes(shape, 512) == moved
    flops = speed.forward_flops(shape, 4, 512)
    ms = speed.estimate(made, "small", 512)
    assert ms["fp32"] == pytest.approx(flops / 1e14 * 1e3 + moved / 2e12 * 1e3)
    # TF32 has half of bf16's rate by the data sheet.
    assert ms["tf32"] == pytest.approx(flops / 5e14 * 1e3 + moved / 2e12 * 1e3, rel=1e-3)
    weights = 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768 + 10_000 * 768
    assert ms["bf16"] == pytest.approx(
        flops / 1e15 * 1e3 + (moved + 6 * weights) / 2e12 * 1e3, rel=1e-3
    )


def test_the_estimated_gain_grows_with_the_size_as_the_page_says():
    mixed = Mixed([ROOT / "data"])
    ratios = [speed.estimate(mixed, model, 512) for model in speed.MODELS]
    values = [ms["fp32"] / ms["bf16"] for ms in ratios]
    assert values == sorted(values) and len(values) == 6


def test_published_times_by_value(empty):
    frame = speed.published(empty, "P", "tab-p").frame
    line = frame[(frame["device"] == "H800 PCIe") & (frame["model"] == "small")].iloc[0]
    # 21.57 / 23.54 and 23.02 / 24.97
    assert (line["forward gain"], line["backward gain"]) == ("0.92×", "0.92×")
    assert "slower than fp32 in 10 of 24 cases" in str(speed.published_trend(empty))
