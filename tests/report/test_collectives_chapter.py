"""What the chapter on collectives says, by value: rows made by hand, in round milliseconds."""

import pytest

from a2lib.report import svg
from a2lib.report.chapters.collectives import (
    Collectives,
    answer,
    buckets,
    line,
    local,
    published,
)

MB = 2**20
KB = 2**10


def row(ms, size=1024 * MB, backend="nccl", world_size=2, operation="all_reduce", dtype="fp32",
        **over):  # fmt: skip
    blank = {"ms_queued": ms / 2, "conditions": "NCCL_NVLS_ENABLE=0"}
    if backend == "gloo":
        blank = {"ms_queued": "", "conditions": "Abacus 1, 8 cores"}
    return {
        "operation": operation, "backend": backend, "world_size": world_size, "dtype": dtype,
        "size": size, "ms": ms, "ms_p20": ms * 0.9, "ms_p80": ms * 1.1, "n": 9,
        "ms_rank_min": ms * 0.7, "ms_rank_median": ms * 0.8, "ms_rank_max": ms * 0.95,
        **blank, **over,
    }  # fmt: skip


# 2**30 bytes in 4 ms are 268 GB/s; over 450 GB/s each way they take 2.386 ms.
ROWS = [
    row(4), row(0.05, MB), row(0.5, 100 * MB),
    row(800, backend="gloo"), row(1, MB, backend="gloo"), row(80, 100 * MB, backend="gloo"),
    row(160, 100 * MB, backend="gloo", world_size=6),
]  # fmt: skip


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows, device="nvidia-h200"):
        return Collectives([synthetic.by_hand(tmp_path, device=device, collectives=rows)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Collectives([tmp_path])


def lines(table, keys=3):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_the_ring(empty):
    assert str(answer.sentence(empty)) == (
        "**The answer.** In a ring of N ranks each sends 2 (N − 1) / N of the tensor, so that "
        "1024 MB between two H200 take at least 2.39 ms over links of 450 GB/s in each direction. "
        "**Not measured yet on an NVIDIA H200**: what they do take."
    )


def test_the_answer_with_rows(made):
    said = str(answer.sentence(made(ROWS)))
    assert (
        "NCCL takes 4.00 ms, 268 GB/s, which is 60% of that; 1 MB takes 0.0500 ms, 21 GB/s" in said
    )
    assert "two processes on the CPU, 200 times as long." in said
    assert "A line" not in said  # three sizes say nothing of residuals
    # 20 us and 256 GB/s.
    sizes = (MB, 10 * MB, 100 * MB, 1024 * MB)
    exact = [row(1e3 * (20e-6 + size / 256e9), size) for size in sizes]
    said = str(answer.sentence(made(exact)))
    # 1 MB takes those 20 us and 4.1 more.
    assert "gives 20.0 µs to any message, 83% of what 1 MB takes, and 256 GB/s beyond; half" in said
    assert "needs 4.88 MB." in said


def test_the_table_has_the_ranks_apart_and_both_bandwidths(made):
    failed = row(1, backend="gloo", world_size=6)
    times = ("ms", "ms_p20", "ms_p80", "n", "ms_rank_min", "ms_rank_median", "ms_rank_max")
    failed |= dict.fromkeys(times, "") | {"status": "oom", "note": "would take 9 GB of 1"}
    found = lines(answer.table(made([*ROWS, failed]), "c", "tab-c"))
    assert found["NCCL", "2", "1024"] == [
        "4.00", "3.60 to 4.40", "2.80 / 3.20 / 3.80", "2.00", "268", "268",
    ]  # fmt: skip
    # 100 * 2**20 bytes in 160 ms, and 10/6 of them on the wire.
    assert found["gloo", "6", "100"][-3:] == ["·", "0.655", "1.09"]
    assert found["gloo", "6", "1024"] == ["oom", *["·"] * 5]
    assert len(found) == len(ROWS) + 1


def test_how_the_factors_act_together(made):
    c = made(ROWS)
    assert str(answer.interactions(c)) == (
        "With NCCL and 2 GPUs a message of 1024 MB travels 12.8 times as fast as one of 1 MB. "
        "With gloo and 2 processes a message of 1024 MB travels 1.28 times as fast as one of 1 MB. "
        "From 2 to 6 processes, 100 MB with gloo take 2.00 times as long; a ring alone, whose "
        "ranks each send 1.67 of the tensor and not 1.00, would take 1.67 times as long. "
        "The time of gloo over NCCL's, for two ranks, is 20.0 at 1 MB and 200 at 1024 MB."
    )
    assert "takes 0.0250 ms at 1 MB (0.0500), 0.250 ms at 100 MB (0.500) and 2.00 ms" in str(
        answer.queued(c)
    )
    assert str(answer.conditions(c)) == (
        "NCCL was of unknown version with NCCL_NVLS_ENABLE=0, without NVLink's multicast; gloo's "
        "processes ran on Abacus 1, 8 cores."
    )


def test_sixteen_bits_by_as_many_bytes(made, empty):
    # In a row they take half the time: 2.2 ms against 2, 0.02 against 0.025.
    c = made([*ROWS, row(4.4, dtype="bf16"), row(0.04, MB, dtype="bf16")])
    assert str(answer.dtypes(c)) == (
        "For as many bytes, calls in a row take 0.80 to 1.10 times as long in bf16 as in fp32, "
        "over 2 pairs: not within 10% of each other at 1 MB and 1024 MB, so that bytes alone do "
        "not decide."
    )
    large = [*ROWS, row(4.2, dtype="bf16")]
    small = str(answer.dtypes(made([*large, row(0.04, MB, dtype="bf16")])))
    assert "over 2 pairs, within 10% from 1024 MB on: there bytes decide" in small
    assert "At 1 MB a call is mostly overhead" in small
    assert "1.05 times as long in bf16 as in fp32, over 1 pairs: what counts is bytes" in str(
        answer.dtypes(made(large))
    )
    assert "Not measured yet" in str(answer.dtypes(empty))


def test_what_has_no_time_has_its_reason(made, empty):
    blank = dict.fromkeys(("ms", "ms_p20", "ms_p80", "n", "ms_queued", "ms_rank_min",
                           "ms_rank_median", "ms_rank_max"), "")  # fmt: skip
    large = row(1, backend="gloo", world_size=6) | blank | {"status": "oom", "note": "19 GB of 18"}
    no = blank | {"status": "unsupported", "note": "no"}
    other = [row(1, size, "gloo", operation="reduce_scatter") | no for size in (100 * MB, MB)]
    said, left, beside = str(answer.untimed(made([*ROWS, large, *other]))).split("\n\n")
    assert said.splitlines() == [
        "- gloo, 2 processes, reduce-scatter in fp32, 1 and 100 MB: n/a (no)",
        "- gloo, 6 processes, all-reduce in fp32, 1024 MB: oom (19 GB of 18)",
    ]
    assert left == (
        "**Not measured yet**, of what the question asks: NCCL, 2 GPUs (10 MB); NCCL, 4 GPUs; "
        "NCCL, 6 GPUs; gloo, 2 processes (10 MB); gloo, 4 processes; gloo, 6 processes (1 and 10 "
        "MB)."
    )
    assert beside == (
        "Nor, of the other operations: reduce-scatter with NCCL, 2 GPUs and reduce-scatter with "
        "gloo, 6 processes."
    )
    every = [row(1, size, backend=b, world_size=n) for b in ("nccl", "gloo") for n in (2, 4, 6)
             for size in (MB, 10 * MB, 100 * MB, 1024 * MB)]  # fmt: skip
    assert str(answer.untimed(made(every))) == "Everything that the question asks has a time."
    assert "Not measured yet on" in str(answer.untimed(empty))


def test_the_other_operations(made):
    others = [row(2.4, operation="reduce_scatter"), row(2, operation="all_gather")]
    c = made([*ROWS, *others])
    assert "these take of its time 60% and 50% with NCCL, 2 GPUs at 1024 MB." in str(
        answer.halves(c)
    )
    others = [row(ms, 100 * MB, "gloo", operation=name) for name, ms in
              (("reduce_scatter", 100), ("all_gather", 200))]  # fmt: skip
    others.append(row(4, 10 * MB, "gloo", operation="all_gather"))
    said = str(answer.halves(made([*ROWS, *others])))
    assert "125% and 250% with gloo, 2 processes at 100 MB. gloo's take longer than" in said
    assert (
        "between two its all-gather of 100 MB takes 50.0 times as long as that of 10 MB, our guess"
        in said
    )
    found = lines(answer.operations(c, "c", "tab-c"))
    # Half of 2**30 bytes in 2 ms.
    assert found == {
        ("NCCL", "2", "1024"): ["4.00", "268", "2.00", "268", "2.40", "224", "·", "·"]
    }  # fmt: skip


def test_where_the_line_fails_is_said_by_size(made):
    sizes = (16 * KB, MB, 10 * MB, 100 * MB, 1024 * MB)
    exact = {size: 1e3 * (30e-6 + size / 256e9) for size in sizes}
    c = made([row(ms, size) for size, ms in exact.items()])
    assert str(line.sentence(c)).endswith(
        "for NCCL, 2 GPUs it is within 10% of all 5 times. In a row, with NCCL, 2 GPUs, the line "
        "is off by 0%, and its overhead is 15.0 µs: this line is what the buckets below are "
        "reckoned with."
    )
    found = lines(line.table(c, "c", "tab-c"), 2)
    assert found["NCCL, 2 GPUs", "alone"][:4] == ["5", "30.0", "256", "7.32"]
    assert found["NCCL, 2 GPUs", "in a row"][:4] == ["5", "15.0", "512", "7.32"]
    slow = exact | {10 * MB: 2 * exact[10 * MB]}
    c = made([row(ms, size) for size, ms in slow.items()])
    said = str(line.sentence(c))
    assert "for NCCL, 2 GPUs it is off by −" in said
    bad = [off for off in line.every(c)[0][3]["off"] if abs(off) > 0.1]
    assert f"by more than 10% at {len(bad)} of 5 sizes." in said and 0 < len(bad) < 5
    ((_, _, fitted, points), _) = line.every(c)
    worst = points.loc[points["off"].idxmax()]
    assert worst["size"] == 10 * MB
    assert worst["off"] == pytest.approx(2e-3 * exact[10 * MB] / fitted.time_s(10 * MB) - 1)


def test_a_message_that_takes_longer_than_one_four_times_as_long_is_told(made):
    times = {MB: 0.08, 2 * MB: 0.05, 4 * MB: 0.06, 100 * MB: 0.5}
    said = str(line.sentence(made([row(ms, size) for size, ms in times.items()])))
    # Of 0.08 ms a fifth took less than 0.072, of 0.06 ms a fifth more than 0.066.
    assert "With NCCL, 2 GPUs 1 MB take 80.0 µs and 4 MB 60.0 µs: the host" in said
    times[4 * MB] = 0.07
    said = str(line.sentence(made([row(ms, size) for size, ms in times.items()])))
    assert "the host" not in said


def test_the_figures_hold_the_points(made, empty):
    sizes = (MB, 10 * MB, 100 * MB, 1024 * MB)
    c = made([row(k, size) for k, size in enumerate(sizes, 1)])
    (ax,) = answer.figure(c).figure.axes
    drawn = next(own for own in ax.lines if len(own.get_xdata()) == 4)
    assert list(drawn.get_xdata()) == list(sizes)
    assert list(drawn.get_ydata()) == pytest.approx([s / k / 1e6 for k, s in enumerate(sizes, 1)])
    chart = line.figure(c)
    above, below = chart.figure.axes
    assert list(above.lines[0].get_ydata()) == pytest.approx([1, 2, 3, 4])
    off = line.every(c)[0][3]["off"]
    assert list(below.lines[0].get_ydata()) == pytest.approx(list(100 * off))
    for one in (chart, answer.figure(c), line.figure(empty), answer.figure(empty)):
        assert svg.smallest_text(one._repr_svg_()) >= svg.LEAST_SIZE


def test_published_figures_stand_beside_ours_with_their_hardware(made, empty):
    found = lines(published.table(made(ROWS), "c", "tab-c"))
    # Means of one writeup, medians of the other: 2**30 bytes in 6.745 ms, 10**9 in 34.453.
    assert found["NCCL", "2", "1024"] == ["6.75 (159)", "·", "34.5 (29.0)", "4.00 (268)"]
    assert found["gloo", "6", "100"] == ["·", "139 (1.20)", "·", "160 (1.09)"]
    assert found["NCCL", "4", "10"] == ["·", "·", "0.581 (25.8)", "·"]
    assert len(found) == 24
    said = str(published.verdict(made(ROWS)))
    assert "159 GB/s between 2, 163 GB/s between 4, 195 GB/s between 6" in said
    assert said.endswith("Ours, H200: 268 GB/s between 2.")
    assert "Not measured yet" in str(published.verdict(empty))
    assert str(published.sources(empty)).count("CS336 assignment 2 (Spring 2025)") == 3


def test_what_the_published_verdict_says_holds_of_the_table(empty):
    """Its words about links are typed, so the rows must bear them out."""
    rates = {}
    for r in empty.reference.sort_values("world_size").itertuples():
        if r.backend == "nccl" and r.size >= 10**9:
            rates.setdefault(r.device, []).append((r.bus, r.ms))
    pcie, nvlink = rates["RTX 5090, PCIe"], rates["unnamed GPUs of 80 GB, NVLink"]
    assert pcie == sorted(pcie, reverse=True) and [b for b, _ in nvlink] == sorted(
        b for b, _ in nvlink
    )
    assert nvlink[2][1] < nvlink[1][1]


SIZES = [16 * KB * 2**k for k in range(17)]
# In a row 20 us and 400 GB/s.
ON_A_LINE = [row(9, size, ms_queued=1e3 * (20e-6 + size / 400e9)) for size in SIZES]
STEP = {
    **buckets.STEP, "capture": "false", "warmup": 5, "n": 9,
    "ms_mean": 50, "ms_std": 1, "ms_min": 50,
}  # fmt: skip


def test_the_best_bucket_by_the_formula(made, empty):
    c = made(ON_A_LINE)
    said = str(buckets.sentence(c))
    # s = 4 * 1,998,235,200 bytes: sqrt(s / (o w)), sqrt(s o w), 2 sqrt(s o / w).
    assert said.startswith(
        "For the 7.99 GB of fp32 gradients of the xl of 2025, sent with NCCL, 2 GPUs, o = 20.0 µs "
        "and w = 400 GB/s, the formula wants 32 buckets of 241 MB, which leave 1.26 ms after"
    )
    assert said.endswith("the backward pass of this model.")  # not measured
    found = lines(buckets.table(c, "c", "tab-c"), 1)
    # 1000 MB are 7.62 buckets of 20 us, and 2.62 ms for the last one's bytes.
    assert found["1000",][1] == "2.77" and found["1000",][-1] == "·"
    # Every gradient of the model but those of embedding, head and norms is above 1 MB.
    assert found["1",][0] == "435"
    for show in (buckets.sentence, buckets.limits):
        assert "Not measured yet" in str(show(empty))
    assert buckets.table(empty, "c", "tab-c").frame.empty


def test_the_clock_beside_the_formula(made, synthetic, tmp_path):
    made(ON_A_LINE)
    synthetic.by_hand(
        tmp_path,
        benchmark=[
            {**STEP, "ms": 1e6, "ms_p20": 1e6, "ms_p80": 1e6},
            {**STEP, "ms": 1, "ms_p20": 1, "ms_p80": 1, "capture": "true"},
        ],
    )
    c = Collectives([tmp_path])
    ways = buckets.ways(c)
    # So long a backward leaves what it makes last: a matrix, a norm and the embedding.
    last = [4 * n for n in (1600 * 1600, 1600, 10_000 * 1600)]
    left = sum(1e3 * (20e-6 + size / 400e9) for size in last)
    assert ways["trained"](MB) == pytest.approx(left, rel=0.02)
    # In one bucket everything is left, and the formula says the same.
    whole = 1e3 * (20e-6 + buckets.BYTES / 400e9)
    assert ways["line"](1e12) == pytest.approx(whole) == ways["formula"](1e12)
    assert ways["measured"](1e12) == pytest.approx(whole, rel=0.01)
    assert "it takes 1000000 ms" in str(buckets.sentence(c))
    (ax,) = buckets.figure(c).figure.axes
    assert [len(own.get_xdata()) for own in ax.lines] == [len(buckets.DRAWN)] * 4
    drawn = dict(zip(buckets.DRAWN, ax.lines[0].get_ydata(), strict=True))
    assert drawn[2**28] == pytest.approx(ways["formula"](2**28))
    assert svg.smallest_text(buckets.figure(c)._repr_svg_()) >= svg.LEAST_SIZE


def test_another_machine_is_shown_with_all_its_rows(made):
    said = str(local.show(made(ROWS, device="cpu")))
    assert "**CPU**\n" in said and "tiny" not in said
    assert "| broadcast |" not in said and said.count("| all_reduce |") == len(ROWS)


def test_the_page_with_rows_and_without(shown_by, synthetic, tmp_path):
    without = shown_by("collectives", tmp_path)
    assert sum("Not measured yet" in text for text in without) >= 6
    full = synthetic.by_hand(tmp_path, collectives=ROWS)
    assert len(shown_by("collectives", full)) == len(without)
