"""What the chapter on memory says, by value: rows made by hand beside what is counted."""

import csv

import pytest

from a2lib.measure import bulk
from a2lib.paths import ROOT
from a2lib.report import svg
from a2lib.report.chapters.memory import (
    Memory,
    answer,
    block,
    fitting,
    largest,
    local,
    nearness,
    peaks,
    precision,
    published,
    steps,
    timeline,
)
from a2lib.report.chapters.memory.rows import counted, step
from a2lib.theory.saved import block_saved_bytes
from a2lib.theory.step_memory import Replay, asked, points, refused
from a2lib.theory.transformer import SIZES

NOT_YET = "**Not measured yet on an NVIDIA H200**"
P = 3_406_809_600  # parameters of the 2.7B model


def row(one, tensors=None, number=1, phase="step", **over):
    key = {"model": "2.7B", "context": one.context, "batch": 4, "mode": one.mode,
           "precision": one.precision, "attention": one.attention}  # fmt: skip
    tensors = asked(one) if tensors is None else tensors
    return {**key, "step_number": number, "phase": phase, "tensor_bytes": tensors, **over}


@pytest.fixture
def made(synthetic, tmp_path):
    def make(device="nvidia-h200", pictures=(), **sections):
        root = synthetic.by_hand(tmp_path, device=device, **sections)
        for table, name, rows in pictures:
            bulk.put(table, device, name, rows, run=synthetic.RUN, about={}, data=root)
        return Memory([root])

    return make


@pytest.fixture
def empty(tmp_path):
    return Memory([tmp_path])


def lines(table, keys=1):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_counted(empty):
    said = str(answer.sentence(empty))
    assert f"{16 * P / 1e9:.1f} GB are there in any case" in said
    assert "two moments, 13.6 GB each. At 128 and 256 tokens that is the peak" in said
    assert "From 512 tokens on the peak is where backward begins" in said
    assert "which does not fit the 141 GB of the GPU" in said and empty.given() is None
    assert "raises the peak in 4 of 5 contexts" in said
    assert str(nearness.nearness(empty)) == f"{NOT_YET}: how near this count comes."
    for sentence in (nearness.levels, timeline.drawn, precision.sentence, largest.verdict):
        assert NOT_YET in str(sentence(empty))
    assert NOT_YET in str(block.sentence(empty)) and NOT_YET in str(block.gradients(empty))
    assert "- forward, kept, 2,048 tokens, fp32: 153 GB" in str(fitting.not_fitting(empty))


def test_how_near_the_count_is(made):
    one = step(512)
    from a2lib.report.chapters.memory.rows import blocks

    taken = blocks(one).allocated
    rows = [row(one, allocated_bytes=taken), row(one, number=0, status="oom", tensor_bytes=""),
            row(one, batch=8, allocated_bytes=1)]  # fmt: skip
    said = str(nearness.nearness(made(memory=rows)))
    assert "gives the peak of 1 steps of this chapter to within 0%." in said
    assert said.endswith("those that the GPU counted in 1 of 1 steps.")
    said = str(nearness.nearness(made(memory=[row(one, 1, allocated_bytes=int(taken / 1.05))])))
    assert "to within 5%, more than the 3% that it should" in said
    assert said.endswith("in 0 of 1 steps.")
    bench = {"model": "small", "context": 128, "batch": 4, "mode": "train-step", "phase": "step",
             "precision": "fp32", "attention": "eager", "compile": "none", "capture": "false",
             "warmup": 5, "ms": 1, "n": 10}  # fmt: skip
    small = blocks(step(128, model="small")).allocated
    others = [{**bench, "mode": "forward", "peak_bytes": 1}, {**bench, "phase": "wall"}]
    m = made(memory=[], benchmark=[{**bench, "peak_bytes": small}, *others])
    said = str(nearness.nearness(m))
    assert "the peak of 1 train-steps of [the benchmark](benchmark.md) to within 0%" in said
    assert said.endswith(f"{NOT_YET}: the peaks of this chapter.")


def test_how_near_the_planner_is(made, empty):
    assert str(nearness.planner(empty)) == f"{NOT_YET}: how near the planner comes."
    one = step(512)
    plan = nearness._planned(one)
    assert plan == pytest.approx(counted(one).total, rel=0.01)
    rows = [row(one, allocated_bytes=int(plan / 1.02)),
            row(step(128), number=0, allocated_bytes=1),
            row(step(128, "forward"), allocated_bytes=1)]  # fmt: skip
    said = str(nearness.planner(made(memory=rows)))
    assert said.endswith("gives the peaks of 1 train-steps of this chapter to within 2.0%.")
    rows = [row(one, allocated_bytes=int(plan / 0.94))]
    size = f"{plan / 0.94 / 1e9:.1f}"
    assert str(nearness.planner(made(memory=rows))).endswith(
        f"to within 6.0%. More than 5% off: 2.7B at 512 tokens (−6.0%; the workspaces are "
        f"0.1% of its {size} GB)."
    )


def test_the_table_has_the_count_the_measured_and_reasons(made, monkeypatch):
    monkeypatch.setattr(peaks, "blocks", lambda one: Replay(13_900_000_000, 0))
    monkeypatch.setattr(peaks, "CONTEXTS", (128, 2048))
    one = step(128, "inference")
    rows = [
        row(one, 13_700_000_000, allocated_bytes=13_800_000_000, reserved_bytes=14_000_000_000),
        row(step(2048), "", status="oom", note="in step 0, forward: CUDA out of memory"),
    ]
    m = made(memory=rows)
    found = lines(peaks.detail(m, "fp32", "c", "tab-c"), 2)
    assert len(found) == 6
    cells = found["128", "forward"]
    assert cells == ["13.7", "13.7", "13.8", "14.0", "+0.72%"]
    assert found["2,048", "train-step"] == ["185", "oom", "·", "·", "·"]
    assert found["2,048", "forward"][1:] == ["·"] * 4
    assert ("2,048", "train-step, ours") in lines(peaks.detail(m, "bf16", "c", "t"), 2)
    assert "{dropdown} 2.7B in fp32: tensors" in str(peaks.folded_detail(m, "fp32", "c", "tab-c"))
    table = peaks.table(m, "c", "tab-c")
    assert list(table.frame.columns)[2:] == ["forward", "forward, kept", "train-step",
                                             "train-step, ours"]  # fmt: skip
    found = lines(table, 2)
    assert len(found) == 4 and found["128", "fp32"] == ["13.7", "*18.3*", "*54.6*", "*54.6*"]
    assert found["2,048", "fp32"][:3] == ["*18.5*", "*153*", "oom (185)"]
    assert str(fitting.not_fitting(m)) == "One configuration ran out of memory."
    assert str(fitting.folded_table(m, "c", "t")) == ""
    assert "fits." in str(fitting.not_fitting(made(memory=rows[:1])))


def refusal(where, asked_for, left, one, model):
    note = (
        f"in {where}: CUDA out of memory. Tried to allocate {asked_for}. GPU 0 has a total "
        f"capacity of 20.00 GiB of which {left} is free. Including"
    )
    return row(one, "", model=model, status="oom", note=note)


def test_what_did_not_fit_ran_out_where_the_count_does(made):
    large, small = step(128, model="large"), step(512, model="large", precision="bf16")
    fits = row(step(128), 1, driver_bytes=4 * 2**30, reserved_bytes=3 * 2**30)
    room = 19 * 2**30
    assert refused(large, room) is None
    there = refused(small, room)
    assert there.number == 1
    asked_for, left = f"{there.wanted / 2**20:.2f} MiB", (room - there.reserved) / 2**20
    rows = [refusal(f"step 1, {there.phase}", asked_for, f"{left - 5:.2f} MiB", small, "large"),
            refusal("step 1, loss", "1.50 GiB", "1.00 GiB", large, "large"), fits]  # fmt: skip
    m = made(memory=rows)
    # What the driver gives is the GPU's memory wherever the chapter speaks of it.
    assert m.capacity() == m.given() == 20 * 2**30
    assert "which does not fit the 21 GB of the GPU" in str(answer.sentence(m))
    assert "21 GB" in answer.peaks(m)._repr_svg_()
    idle = (there.reserved - there.allocated) / 1e9
    assert str(fitting.not_fitting(m)) == (
        "2 configurations ran out of the 21.5 GB that the driver gives (the GPU's maker states "
        "141). It counts 1.07 GB of them beside the allocator's. Where the counted allocator has "
        "the rest for its capacity, it is refused a segment of the same size in the same phase of "
        "the same step in 1 of 2, with what was left on the device off by 5 MiB at "
        f"most. By then {idle:#.3g} GB of what it had taken were free by the count, in pieces too "
        "small for it: so much is lost to fragmentation."
    )
    assert fitting.table(m, "c", "t").frame.values.tolist() == [
        ["large", "train-step, bf16", "512", f"second step's {there.phase}", asked_for,
         f"{left - 5:.0f}", f"{left:.0f}"],
        ["large", "train-step, fp32", "128", "second step's loss (fits)", "1.50 GiB",
         "1,024", "·"],
    ]  # fmt: skip


def test_where_the_count_runs_out_elsewhere_is_in_brackets(made):
    one = step(2048)
    found = refused(one, 19 * 2**30)
    assert (found.number, found.phase) == (0, "forward")
    fits = row(step(128), 1, driver_bytes=4 * 2**30, reserved_bytes=3 * 2**30)
    m = made(memory=[refusal("step 0, loss", "2.00 GiB", "1.00 GiB", one, "2.7B"), fits])
    (cells,) = fitting.table(m, "c", "t").frame.values.tolist()
    wanted = fitting._asked(found.wanted)
    assert cells[3:6] == [f"loss (forward, {wanted})", "2.00 GiB", "1,024"]
    assert str(fitting.not_fitting(m)).endswith("of the same step in 0 of 1.")
    assert "{dropdown} Where each ran out" in str(fitting.folded_table(m, "c", "t"))


def test_what_the_largest_model_needs(made, empty):
    said = str(fitting.largest(empty))
    assert "are 16 bytes a parameter, 205 GB, so that no train-step fits one GPU" in said
    assert "154 GB of weights and moments stay, too many as well" in said
    found = lines(fitting.ways(empty, "c", "t"))
    assert set(found) == {(way,) for way in fitting.WAYS}
    # Whole state with its moments whole, in 8 bits, halved; all of it halved.
    n = 12_832_823_808
    for (way, cells), least in zip(found.items(), (16, 10, 12, 8, 8), strict=True):
        size = float(cells[0].strip("*"))
        assert least * n / 1e9 - 0.5 < size < (least + 0.5) * n / 1e9, way
        assert cells[0].startswith("**") == (size < 141)
    assert found["2 GPUs, all state divided (FSDP)",][-1] == "225"
    fits = row(step(128), 1, driver_bytes=4 * 2**30, reserved_bytes=3 * 2**30)
    small = made(memory=[refusal("step 0, loss", "1 GiB", "1 GiB", step(256), "2.7B"), fits])
    assert "**" not in str(fitting.ways(small, "c", "t"))


def test_every_size(made, monkeypatch):
    monkeypatch.setattr(peaks, "OTHERS", ("small", "10B"))
    monkeypatch.setattr(peaks, "CONTEXTS", (128, 512))
    rows = [row(step(512, model="small"), 4_400_000_000, model="small"),
            row(step(512, model="10B"), "", model="10B", status="oom")]  # fmt: skip
    m = made(memory=rows)
    found = lines(peaks.others(m, "train-step", "c", "tab-c"), 2)
    assert len(found) == 4 and found["small", "fp32"] == ["*2.21*", "4.40"]
    assert found["10B", "fp32"] == ["*205*", "oom (206)"]
    assert lines(peaks.others(m, "inference", "c", "t"), 2)["10B", "bf16"] == ["*77.0*", "*77.1*"]
    said = f"{NOT_YET}: of these peaks 7 of 8 of small and 7 of 8 of 10B."
    assert str(peaks.not_measured(m)) == said
    rows = [row(step(c, mode, p, model="small"), 1, model="small") for c in (128, 512)
            for mode in ("inference", "train-step") for p in ("fp32", "bf16")]  # fmt: skip
    assert str(peaks.not_measured(made(memory=rows))).endswith("of these peaks 8 of 8 of 10B.")
    monkeypatch.setattr(peaks, "OTHERS", ("small",))
    assert str(peaks.not_measured(made(memory=rows))) == ""


def test_the_figure_of_peaks_by_value(made, monkeypatch):
    monkeypatch.setattr(answer, "CONTEXTS", (128, 2048))
    m = made(memory=[row(step(128), 60_000_000_000), row(step(2048), "", status="oom")])
    chart = answer.peaks(m)
    upper, lower = chart.figure.axes
    marks = [(x, y, line.get_marker()) for line in upper.lines[:-1]
             for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]  # fmt: skip
    assert marks[0] == (0.27, 60, "_") and marks[1][2] == "x" and len(marks) == 2
    tops = {}
    for bar in upper.patches:
        x = round(bar.get_x() + bar.get_width() / 2, 2)
        tops[x] = max(tops.get(x, 0), bar.get_y() + bar.get_height())
    assert len(tops) == 6
    assert tops[1.27] == pytest.approx(counted(step(2048)).total / 1e9)
    assert len(lower.lines) == 1
    text = chart._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE and "141 GB" in text


def test_what_blocks_add(made, empty):
    said = str(nearness.levels(empty))
    assert "a matrix of 25 MiB holds 26 MiB for good" in said and "68.1 GB by the count" in said
    assert "of which cuBLAS's two workspaces are 64" in said
    rows = [row(step(512), 10**10, allocated_bytes=2 * 10**10, reserved_bytes=3 * 10**10,
                driver_bytes=4 * 10**10)]  # fmt: skip
    off = 100 * (1 - nearness.blocks(step(512)).reserved / 10**11)
    rows[0] |= {"reserved_bytes": 10**11}
    assert str(nearness.levels(made(memory=rows))).endswith(
        "Measured: 10.0 GB of tensors and workspaces, 20.0 GB of blocks, 100 GB from the device; "
        "the driver counts 40.0 GB, with the CUDA context and the kernels. Over all 1 steps what "
        "is reserved is 400.0% more than the blocks of the peak, and the counted one within 3% of "
        f"it in 0. The farthest (−{off:.0f}%) is 2.7B at 512 tokens, train-step in fp32: of equal "
        "free blocks PyTorch takes the one of the lowest address, and where the device puts a "
        "segment the count does not know."
    )
    rows[0] |= {"reserved_bytes": nearness.blocks(step(512)).reserved}
    assert str(nearness.levels(made(memory=rows))).endswith("within 3% of it in 1.")


def test_the_first_step_beside_the_second(made, empty):
    said = str(steps.first_step(empty))
    assert "peaks in the optimizer's phase at 512 tokens, with 54.5 GB, the second in" in said
    assert "backward, with 63.1; at 2,048 tokens, where both peak in backward" in said
    assert "it is 158 and 185. At 128 and 256 tokens both peak alike" in said
    assert said.endswith("where activations decide.") and str(steps.where(empty)) == ""
    first, later = step(512, first=True), step(512)
    sizes = {0: (30, 31, 32, 54), 1: (60, 61, 63, 54)}
    rows = [row(one, size * 10**9, number, phase)
            for number, one in ((0, first), (1, later))
            for phase, size in zip(steps.PHASES, sizes[number], strict=True)]  # fmt: skip
    rows += [row(step(128), "", number, "backward", status="oom") for number in (0, 1)]
    rows += [row(step(128), 10**9, 0, "forward")]  # of a step that ended before its peak
    m = made(memory=rows)
    assert str(steps.first_step(m)).endswith(
        "Measured, backward's peak rises from the first step to the second by 31.0 GB in 1 "
        "train-steps."
    )
    found = lines(steps.by_phase(m, "c", "tab-c"), 3)
    assert found["512", "fp32", "1"] == ["30.0", "31.0", "32.0", "**54.0**"]
    assert found["512", "fp32", "2"] == ["60.0", "61.0", "**63.0**", "54.0"]
    assert found["128", "fp32", "2"] == ["·"] * 4 and ("2,048", "bf16, ours", "1") in found
    assert "Of 1 train-steps after the first 1 peak in backward" in str(steps.where(m))
    assert "the counted one in 2 of 2 steps, first ones" in str(steps.where(m))
    rows[3] |= {"tensor_bytes": 1}
    assert "the counted one in 1 of 2 steps, first ones" in str(steps.where(made(memory=rows)))
    rows[4] |= {"tensor_bytes": 10**12}
    assert "the first 0 peak in backward" in str(steps.where(made(memory=rows)))


def test_timelines_are_recorded_or_counted(made, empty):
    one = step(512, "inference")
    flat = [{"time_us": 1000 * i, "phase": "step 1/forward" if i else "step 1", **found}
            for i, (_, found) in enumerate(points(one)[:4])]  # fmt: skip
    recorded = {k: v for k, v in row(one).items() if k not in ("phase",)}
    m = made(
        memory_recording=[{**recorded, "allocations": 7, "unexplained_bytes": 0},
                          {**recorded, "context": 128, "allocations": 7,
                           "unexplained_bytes": 3}],
        pictures=[("memory", "2.7B-512-inference-fp32-eager-1", flat)],
    )  # fmt: skip
    words = timeline.chart(m, 512, "inference")._repr_svg_()
    assert "host time (ms)" in words and "tensors made and dropped" not in words
    assert "tensors made and dropped" in timeline.by_count(one)._repr_svg_()
    assert "not measured" not in timeline.chart(empty, 512, "inference")._repr_svg_()
    said = str(timeline.drawn(m))
    assert "every allocation of two steps recorded" in said and "is drawn from the count" in said
    ((ax,), times) = timeline.chart(m, 512, "inference").figure.axes, len(flat) - 2
    assert ax.get_xlim() == (0, times)  # from the forward on
    more = (asked(one) - asked(step(128, "inference"))) / 1e6
    assert str(timeline.drawn(m)).endswith(timeline.agreement(m))
    assert timeline.agreement(m) == (
        "Of 2 recorded steps the peak is the counted one, cuBLAS's workspaces of 32 MiB a thread "
        "included, to the byte in 1; "
        f"elsewhere they are {more:+,.1f} MB apart. At the end the recording leaves 3 "
        "bytes of the allocator's unexplained."
    )


def test_bf16_beside_fp32(made, empty):
    assert "1.40 to 1.49 times" in str(precision.sentence(empty))
    rows = [row(step(512, "inference", p), size) for p, size in (("fp32", 100), ("bf16", 150))]
    rows += [row(step(128, "inference", p), size) for p, size in (("fp32", 100), ("bf16", 50))]
    rows += [row(step(128, "forward"), 100), row(step(128, "forward", "bf16"), "", status="oom")]
    assert str(precision.sentence(made(memory=rows))).endswith(
        "Measured, bf16 takes less in 1 of 2 configurations of 2.7B that fit in both, 0.50 to 1.50 "
        "times as much."
    )
    sizes = {("small", 512): (100, 96), ("large", 512): (100, 99), ("large", 2048): (100, 110)}
    rows += [row(step(c, "train-step", p, model=model), size, model=model)
             for (model, c), both in sizes.items()
             for p, size in zip(("fp32", "bf16"), both, strict=True)]  # fmt: skip
    assert (
        "Of the other sizes' train-steps it takes less in 2 of 3: small at 512 and large at 512 "
        "tokens, 0.96 to 0.99 times as much. What bf16 saves"
    ) in str(precision.sentence(made(memory=rows)))
    assert str(precision.sentence(made(memory=[*rows[:6], *rows[-2:]]))).endswith("less in 0 of 1.")
    # As it is said there: copies whatever the tokens, less in proportion, more by their square.
    narrow, wide = ([block_saved_bytes(SIZES["small"], 4, c, "eager", p) for c in (128, 256, 384)]
                    for p in ("bf16", "fp32"))  # fmt: skip
    one, two, three = (n - w for n, w in zip(narrow, wide, strict=True))
    bent = (three - 2 * two + one) / 2
    slope = two - one - 3 * bent
    assert bent == 2 * 4 * 12 * 128**2 and slope < 0
    assert one - slope - bent == 2 * (4 * 768**2 + 3 * 768 * SIZES["small"].d_ff)
    # 2 bytes of a number, of a block's matrices and the head, not of embedding and norms.
    assert precision.copies("2.7B") == 2 * (P - 10_000 * 2560 - 65 * 2560)
    said = str(precision.cache(empty))
    assert "6,762,086,400 of 2.7B and 25,572,556,800 of 10B in bytes" in said
    assert "77.0 GB in bf16 and 51.5 in fp32 (10B)" in said and NOT_YET in said
    rows = [row(step(128, "inference", p), size) for p, size in (("fp32", 10), ("bf16", 14))]
    rows += [row(step(512, "inference", "bf16")), row(step(512, "inference"), "", status="oom")]
    assert str(precision.cache(made(memory=rows))).endswith(
        "takes 1.40 times as much in bf16 (1 pairs); with those copies the counted peak is the "
        "GPU's to the byte in 1 of 2 steps."
    )
    found = lines(precision.table("c", "tab-c"))
    assert found["copies of the weights",] == ["0.0", "210", "0.0", "210", "0.0", "210"]
    for context in (128, 2048):
        for p in ("fp32", "bf16"):
            kinds = precision.kinds(context, p)
            assert sum(kinds.values()) == block_saved_bytes(SIZES["2.7B"], 4, context, "eager", p)
    assert kinds["scores"] == 6 * 4 * 32 * 2048**2 + 2048**2


def test_the_largest(made, empty):
    assert "4 x 512 x 2560 x 4 = 20,971,520 bytes, 20 MiB" in str(largest.residual_sentence())
    found = lines(largest.by_size("c", "tab-c"))
    assert found["scores, (B, H, T, T)",][2] == "**134**"
    assert found["FFN, (B, T, F)",][:3] == ["**21.0**", "**41.9**", "83.9"]
    assert "here 320 tokens" in str(largest.sentence())
    rows = [
        {"bytes": 4 * 32 * 512 * 512 * 4, "count": 96, "category": "temporaries",
         "phase": "forward", "name": "", "line": "attention/reference.py:33 attention_reference"},
        {"bytes": 2**20, "count": 2, "category": "gradients", "phase": "backward",
         "name": "lm_head.weight", "line": ""},
    ]  # fmt: skip
    m = made(pictures=[("lines", "2.7B-512-train-step-fp32-eager-1", rows)])
    assert str(largest.verdict(m)) == (
        "Recorded: the largest of the forward are 96 of 134,217,728 bytes, the size of scores, (B, "
        "H, T, T), asked for by `attention/reference.py:33 attention_reference`."
    )
    shown = largest.lines(m, "train-step", "c", "tab-c").frame.astype(str).values.tolist()
    assert shown[1] == ["1.0", "2", "backward", "gradients",
                        "backward's own thread (lm_head.weight)"]  # fmt: skip
    rows.append(rows[0] | {"phase": "backward", "count": 5, "line": ""})
    m = made(pictures=[("lines", "2.7B-512-train-step-fp32-eager-1", rows)])
    assert str(largest.verdict(m)).endswith("Backward asks for 5 of that size.")


def of_block(context, p, attention, more=0, **over):
    saved = block_saved_bytes(SIZES["2.7B"], 4, context, attention, p)
    return {"model": "2.7B", "context": context, "batch": 4, "precision": p,
            "attention": attention, "saved_bytes": saved + more, "grown_bytes": saved,
            "gradient_bytes": 419_450_880, **over}  # fmt: skip


def test_a_block_by_value(made, empty):
    said = str(block.sentence(empty))
    # 4 (10 u + 4 g + s + 2 r) + T T bytes, of which the probabilities 4 s.
    assert "keeps 4,333 MB in fp32 with eager attention, 50% of it in one tensor" in said
    assert "Its gradients are 419 MB" in said
    m = made(memory_block=[of_block(2048, "fp32", "eager"), of_block(128, "bf16", "flash", 8)])
    assert block.checked(m) == (
        "Autograd's hooks saw the formula's bytes in 1 of 2 blocks and elsewhere up to 8 bytes "
        "more or less; the allocator gave out those in 2 of 2."
    )
    found = lines(block.table(m, "c", "tab-c"), 3)
    formula = f"{block_saved_bytes(SIZES['2.7B'], 4, 2048):,}"
    assert found["2,048", "fp32", "eager"] == [formula, formula, formula, "419,450,880",
                                               "419,450,880"]  # fmt: skip
    assert found["512", "fp32", "eager"][1:4] == ["·"] * 3
    refused = of_block(512, "fp32", "eager", status="unsupported", note="no kernel")
    refused |= dict.fromkeys(("saved_bytes", "grown_bytes", "gradient_bytes"), "")
    found = lines(block.table(made(memory_block=[refused]), "c", "tab-c"), 3)
    assert found["512", "fp32", "eager"][1:4] == ["n/a", "·", "·"]
    assert str(block.gradients(m)).endswith("Measured: so in 2 of 2 blocks.")
    wrong = made(memory_block=[of_block(2048, "fp32", "eager", gradient_bytes=1)])
    assert str(block.gradients(wrong)).endswith("so in 0 of 1 blocks.")
    assert "Behind the probabilities 4 of the five are equal" in str(block.ties())
    assert "from 512 tokens on" in str(block.against_activations())


def test_the_five_largest_and_who_keeps_them(made, empty):
    rows = [{"number": 0, "module": "attn", "operations": "SoftmaxBackward0.result Bmm.self",
             "shape": "4x32", "dtype": "float32", "bytes": 2 * 10**9}]  # fmt: skip
    m = made(pictures=[("saved", "2.7B-2048-forward-backward-fp32-eager", rows)])
    first, second, *_ = block.five(m, "fp32", "eager", "c", "tab-c").frame.values.tolist()
    assert first == ["attn: probabilities", "2,147", "49.6%",
                     "`SoftmaxBackward0.result`, attn: 2,000 MB"]  # fmt: skip
    assert second[-1] == "·"
    text = block.chart()._repr_svg_()
    assert svg.smallest_text(text) >= svg.LEAST_SIZE
    ends = [t.get_text().strip() for t in block.chart().figure.axes[0].texts]
    assert ends == ["4.33", "2.18", "4.82", "1.59"]


def test_published_answers_are_held_against_the_count(empty):
    assert "25 x 512 x 512 x 4 = 104,857,600, equal to the last byte" in str(
        published.fixed_sizes(empty)
    )
    assert "2 times ours: it multiplies by 8" in str(published.wrong_width(empty))
    assert "the largest there are the logits, 20.5 MB" in str(published.hidden(empty))
    assert f"16 bytes of each make {16 * 969_411_840 / 1e9:.1f} GB" in str(
        published.out_of_memory(empty)
    )
    assert "takes 16.0 GB by the count: a GPU" in str(published.out_of_memory(empty))
    assert "0.98 times our count at 512 tokens" in str(published.two_scores(empty))
    assert "rises to 1.42 times" in str(published.halving(empty))
    said = str(published.accounts(empty))
    assert "the 6 forwards of the H800 PCIe to within 0.9% (ours: 17%)" in said
    assert "more than the GPU has" in str(published.misprint(empty))
    with (ROOT / "data" / "reference" / "memory.csv").open(newline="") as file:
        peaks = sum(r["quantity"] == "peak" for r in csv.DictReader(file))
    assert len(published.table(empty, "c", "tab-c").frame) == peaks


def test_published_peaks_have_ours_beside_them(made):
    m = made(memory=[row(step(512), 63_000_000_000), row(step(256), "", status="oom")])
    found = lines(published.table(m, "c", "tab-c"), 5)
    assert found["H800 PCIe", "2.7B", "512", "train-step", "fp32"][-2:] == ["70.0", "63.0"]
    assert found["H800 PCIe", "2.7B", "256", "train-step", "fp32"][-1] == "oom"
    assert found["A100 40 GB", "xl (2025)", "512", "forward", "bf16"][-1] == "·"
    m = made(memory=[row(step(128), 1, model="large", allocated_bytes=17 * 10**9)])
    said = "takes 16.0 GB by the count, 17.0 GB on the H200: a GPU of 24 GB"
    assert said in str(published.out_of_memory(m))


def test_your_machine(made):
    m = made(device="nvidia-h100", memory=[
        {"model": "small", "context": 512, "batch": 4, "mode": "train-step", "precision": "fp32",
         "attention": "eager", "step_number": 1, "phase": phase, "tensor_bytes": 250 * 10**6}
        for phase in ("step", "forward")
    ])  # fmt: skip
    shown = str(local.show(m))
    assert shown.count("train-step, fp32, eager") == 1 and "250" in shown


@pytest.mark.parametrize("page", ["memory-block", "memory-published"])
def test_a_page_without_rows(shown_by, page, tmp_path):
    shown = "\n".join(shown_by(page, tmp_path))
    assert " nan" not in shown and "None " not in shown.replace("None has", "")
    assert (NOT_YET in shown) == (page == "memory-block")
