"""What the chapter on data parallelism says, by value: rows made by hand, in round milliseconds."""

import pytest

from a2lib.report import svg
from a2lib.report.chapters.ddp import (
    Ddp,
    answer,
    buckets,
    choice,
    host,
    local,
    losses,
    timeline,
    updates,
    ways,
)
from a2lib.theory.latency import Line
from a2lib.theory.transformer import SIZES, parameter_count

MB = 2**20
WITHOUT = {False: 100, True: 80}


def row(ms, wrapper="bucketed", bucket_mb=0, capture=False, model="xl25", **over):
    blank = {"ms_communication": "", "ms_backward_without": "", "ms_host": 3}
    if not capture:
        blank = {"ms_communication": 40, "ms_backward_without": 50, "ms_host": 90}
    return {
        "wrapper": wrapper, "bucket_mb": bucket_mb, "carrier": "backend", "sent_dtype": "fp32",
        "model": model, "batch": 4, "context": 512, "precision": "bf16", "attention": "flash",
        "compile": "blocks", "capture": str(capture).lower(), "backend": "nccl", "world_size": 2,
        "ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, "n": 20, "ms_without": WITHOUT[capture],
        "ms_without_p20": WITHOUT[capture] - 1, "ms_without_p80": WITHOUT[capture] + 1,
        "ms_rank_min": ms - 0.5, "ms_rank_median": ms - 0.25, "ms_rank_max": ms,
        "sent_bytes": 8 * 10**9, "conditions": "", "note": "", **blank, **over,
    }  # fmt: skip


ENGINES, LOW = {"carrier": "copy_engines"}, {"sent_dtype": "bf16"}
ROWS = [
    row(150, "naive", ms_communication=60), row(130, "flat"),
    row(110, "overlapped", ms_communication=50),
    row(108, bucket_mb=1), row(106, bucket_mb=10), row(104, bucket_mb=100),
    row(112, bucket_mb=1000), row(160, "torch_ddp", 25, ms_communication="", ms_host=155),
    row(96, "overlapped", capture=True), row(90, bucket_mb=10, capture=True),
    row(88, bucket_mb=100, capture=True), row(82, bucket_mb=100, capture=True, **ENGINES),
    row(86, bucket_mb=100, capture=True, **LOW),
    row(85, bucket_mb=100, capture=True, **ENGINES, **LOW),
]  # fmt: skip


BESIDE = [
    row(80.8, "updating", 100, capture=True, **ENGINES),
    row(84.8, "updating", 100, capture=True, **ENGINES, **LOW),
]


def of_one(mode, ms):
    return {"model": "xl25", "context": 512, "batch": 4, "mode": mode, "precision": "bf16",
            "attention": "flash", "compile": "blocks", "capture": "true", "warmup": 5,
            "phase": "step", "ms": ms, "n": 9}  # fmt: skip


# One GPU's step takes 0.95 of its time with the update beside its backward: of 80 ms 76.
ALONE = [of_one("train-step", 60), of_one("overlapped-step", 57)]


def collective(size, ms):
    return {"operation": "all_reduce", "backend": "nccl", "world_size": 2, "dtype": "fp32",
            "size": size, "ms": ms, "n": 9, "ms_queued": ms, "note": ""}  # fmt: skip


# 40 us a message and 250 GB/s.
LINE = Line(40e-6, 250e9)
SENT = [collective(s * MB, 1e3 * LINE.time_s(s * MB)) for s in (1, 10, 100, 1024)]


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows, device="nvidia-h200", **sections):
        return Ddp([synthetic.by_hand(tmp_path, device=device, ddp=rows, **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Ddp([tmp_path])


def lines(table):
    return {tuple(row[:1]): row[1:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_what_has_to_travel(empty):
    assert str(answer.sentence(empty)) == (
        "**The answer.** The xl of 2025 has 8.0 GB of gradients to average, at least 17.8 ms "
        "between two H200. **Not measured yet on an NVIDIA H200**: what they add to a step."
    )
    said = str(answer.estimate(empty))
    assert "The xl of 2025 has 8.0 GB of gradients in fp32, which take at least 17.8 ms" in said
    assert "the xl of 2026 (2.7B) has 13.6 GB" in said and "in bf16 8.88 ms" in said


def test_the_answer_with_rows(made):
    assert str(answer.sentence(made(ROWS))).endswith(
        "Launched from Python a step takes 100 ms with nothing sent, and with them 150 ms (after "
        "backward, each by itself; 149 to 151), 130 ms (after backward, all in one; 129 to 131), "
        "110 ms (during backward, each by itself; 109 to 111) and 104 ms (during backward, buckets "
        "of 100 MB; 103 to 105). "
        "Replayed from a CUDA graph it takes 80.0 ms, and with the best of ours that updates after "
        "backward (during backward, buckets of 100 MB, by copy engines) 82.0, 1.025 times as long. "
        "PyTorch's DDP as its users run it, launched, takes 160 ms: the best of ours takes 0.650 "
        "of that launched and 0.512 replayed."
    )
    beside = (
        " With the update beside the messages it takes 80.8 ms, 1.010 times as long as that step "
        "of one GPU in turns with it (80.0)"
    )
    theirs = (
        " PyTorch's DDP as its users run it, launched, takes 160 ms: the best of ours takes 0.650 "
        "of that launched and 0.505 replayed."
    )
    assert str(answer.sentence(made([*ROWS, *BESIDE]))).endswith(f"{beside}.{theirs}")
    # 80.8 / 76.
    assert str(answer.sentence(made([*ROWS, *BESIDE], benchmark=ALONE))).endswith(
        f"{beside} and 1.063 times as long as one GPU's that updates beside backward too.{theirs}"
    )
    assert str(answer.sentence(made(ROWS[:3]))).endswith(
        "**Not measured yet on an NVIDIA H200**: the step in a CUDA graph."
    )


def test_each_way_has_its_step_and_its_share(made):
    c = made([*ROWS, row(140, "naive", model="2.7B")])
    assert str(answer.naive(c)).startswith(
        "For the xl of 2025 a step takes 150 ms (149 to 151 from p20 to p80) and 100 ms (99.0 to "
        "101) without communication: by the medians 33% of it is spent communicating. The "
        "all-reduces alone, after a backward, take 60.0 ms. Those begin from rest; in the step "
        "they are queued behind backward, and add less: the host is behind there, since without "
        "communication the step takes 100 ms launched and 80.0 replayed, so that its GPU stands "
        "idle for 20.0, and while messages travel the host catches up. For the xl of 2026 (2.7B) a "
        "step takes 140 ms"
    )
    other = made([ROWS[0], row(120, "overlapped", capture=True)])
    other.table.loc[other.table["capture"], "run"] = "another"
    assert str(answer.naive(other)).endswith("queued behind backward, and add less.")
    # Neither an earlier end of the replay within its spread nor a later one is the host's doing.
    for ms in (98.5, 101):
        ahead = [ROWS[0], row(120, "overlapped", capture=True, ms_without=ms)]
        assert str(answer.naive(made(ahead))).endswith("queued behind backward, and add less.")
    assert (
        "a step takes 130 ms in place of 150 ms, and 100 and 100 ms without communication. It adds "
        "30.0 ms in place of 50.0 ms; alone it takes 40.0 ms" in str(answer.flat(c))
    )
    # 10 of 50 ms are exposed.
    assert str(answer.overlap(c)) == (
        "For the xl of 2025 a step takes 110 ms, 150 ms with the same messages after backward: of "
        "the 50.0 ms that the messages take alone, 10.0 ms are added to the step and 80% is "
        "hidden. Replayed from a CUDA graph, where nothing hides in the host's gaps, it takes 96.0 "
        "ms, 16.0 ms above the step without communication."
    )
    assert str(answer.buckets(c)) == (
        "For the xl of 2025, launched from Python, buckets add 8.00 ms with 1 MB, 6.00 ms with 10 "
        "MB, 4.00 ms with 100 MB and 12.0 ms with 1000 MB, and one message for each gradient 10.0 "
        "ms; the shortest step has 100 MB, 98 messages: 104 ms (103 to 105); level with it: 10 MB. "
        "Those of 1 MB send the same messages as each gradient by itself: what their steps differ "
        "by, 2.00 ms, is the host's or chance, not the size's. For the xl of 2025, replayed from a "
        "CUDA graph, buckets add 10.0 ms with 10 MB and 8.00 ms with 100 MB, and one message for "
        "each gradient 16.0 ms; the shortest step has 100 MB, 98 messages: 88.0 ms (87.0 to 89.0); "
        "level with it: 10 MB."
    )
    larger = [row(ms, *way, model="2.7B") for ms, *way in
              ((160, "overlapped"), (150, "bucketed", 1), (130, "bucketed", 10))]  # fmt: skip
    assert str(answer.buckets(made(larger))).endswith(
        "Those of 1 and 10 MB send the same messages as each gradient by itself: what their steps "
        "differ by, 10.0 to 30.0 ms, is the host's or chance, not the size's."
    )
    quick = [row(120, bucket_mb=1), row(104, bucket_mb=1000, ms_host=99)]
    assert (
        "the shortest step has 1000 MB, 8 messages: 104 ms (103 to 105). The host takes 99.0 ms to "
        "issue the shortest step: what is hidden there is hidden in the host's gaps as well"
    ) in str(answer.buckets(made(quick)))
    assert str(losses.carriers(c)).startswith(
        "In buckets of 100 MB and replayed, NCCL in fp32 adds 8.00 ms to the step, copy engines in "
        "fp32 2.00 ms, NCCL in bf16 6.00 ms and copy engines in bf16 5.00 ms. Copy engines take "
    )


def test_nothing_is_hidden_where_the_step_takes_longer_than_its_messages(made):
    c = made([row(150, "naive"), row(145, "overlapped")])
    assert str(answer.overlap(c)).endswith(
        "45.0 ms are added to the step, more than the 40.0 ms that the messages take alone, so "
        "that nothing is hidden."
    )
    found = lines(ways.table(c, "xl25", False, "c", "tab-c"))
    assert found["each",][4:7] == ["45.0", "40.0", "0%"]


def test_what_has_no_time_has_its_reason(made, empty):
    blank = {k: "" for k in row(1) if k.startswith("ms") or k == "n"}
    note = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity"
    failed = row(1, bucket_mb=400, capture=True) | blank | {"status": "oom", "note": note}
    shown = row(150, "naive", conditions="NCCL_MAX_CTAS=8")
    assert str(answer.untimed(made([failed, *ROWS[1:7], shown]))).split("\n\n") == [
        "- xl25, replayed from a CUDA graph, during backward, buckets of 400 MB: oom (CUDA out of "
        "memory. Tried to allocate 2 GiB)",
        "**Not measured yet**, launched, of what the handouts ask: the xl of 2026 (2.7B): naive, "
        "flat, each, 1 MB, 10 MB, 100 MB and 1000 MB.",
        "Some rows are with NCCL_MAX_CTAS=8.",
    ]
    large = [{**one, "model": "2.7B"} for one in ROWS[:7]]
    assert str(answer.untimed(made([*ROWS, *large]))) == ("Every way that was tried has its times.")
    assert "Not measured yet on" in str(answer.untimed(empty))


def test_the_table_has_what_is_hidden_and_why_a_row_has_no_time(made):
    failed = row(1, bucket_mb=400, capture=True)
    failed |= {k: "" for k in failed if k.startswith("ms") or k == "n"} | {"status": "oom"}
    c = made([*ROWS, failed])
    found = lines(ways.table(c, "xl25", False, "c", "tab-c"))
    assert list(found)[:3] == [
        ("naive",), ("flat",), ("each",),
    ]  # fmt: skip
    # Nothing can hide what is sent after backward; of 40 ms during it 4 are exposed.
    assert found["100 MB",][4:7] == ["4.00", "40.0", "90%"]
    assert found["naive",] == [
        "150", "149 to 151", "100", "99.0 to 101", "50.0", "60.0", "·", "90.0", "150 / 150 / 150",
    ]  # fmt: skip
    assert found["PyTorch, 25 MB",][5:7] == ["·", "·"]
    captured = lines(ways.table(c, "xl25", True, "c", "tab-c"))
    assert captured["400 MB",][0] == "oom"
    assert captured["100 MB, bf16",][4] == "6.00"
    assert len(found) == 8 and len(captured) == 7


def test_what_an_update_beside_the_messages_hides(made, empty):
    """One GPU is spared 4 ms. Spreads are 2 ms."""
    alone = made([*ROWS, *BESIDE])
    assert "Not measured yet" in str(updates.sentence(alone))
    assert lines(updates.table(alone, "c", "t"))["copy engines in fp32",][3:] == [
        "·", "1.025", "1.010", "·",
    ]  # fmt: skip
    low = row(74, "updating", 100, capture=True, **ENGINES, **LOW)
    nccl = row(85, "updating", 100, capture=True)
    c = made([*ROWS, BESIDE[0], low, nccl], benchmark=ALONE)
    assert str(updates.sentence(c)) == (
        "Beside the messages the update spares 3.00 ms (NCCL in fp32), 1.20 ms (copy engines in "
        "fp32) and 11.0 ms (copy engines in bf16). One GPU that sends nothing is spared 4.00 ms by "
        "the same, by the shares of {ref}`benchmark-updates`. The rest is communication that it "
        "hides: copy engines in bf16 (7.00 ms more). Within the spread of a step or of one without "
        "communication are NCCL in fp32 (1.00 ms less): that the update hides communication there "
        "is not seen. Below that are copy engines in fp32 (2.80 ms less)."
    )
    wide = made([*ROWS, low | {"ms_without_p20": 74, "ms_without_p80": 82}], benchmark=ALONE)
    assert "without communication are copy engines in bf16 (7.00 ms more)" in str(
        updates.sentence(wide)
    )
    found = lines(updates.table(c, "c", "t"))
    assert found["copy engines in fp32",] == [
        "82.0", "80.8", "1.20", "4.00", "1.025", "1.010", "1.063",
    ]  # fmt: skip
    slow = row(166, "updating", 100, **ENGINES, ms_host=144)
    slow = [*ROWS, BESIDE[0], slow, row(96, bucket_mb=100, **ENGINES, ms_host=118)]
    assert str(updates.sentence(made(slow, benchmark=ALONE))).endswith(
        " An update beside the messages is for captured steps: launched, that by copy engines "
        "takes 166 ms where its replay takes 80.8, since it takes the host 144 ms to issue, with "
        "the update after backward 118."
    )
    assert "Not measured yet" in str(updates.sentence(empty))


def test_which_wrapper_to_use_is_as_one_types_it(made, empty):
    """`ROWS` has the host at 90 of 104 ms."""
    assert str(choice.sentence(made([*ROWS, *BESIDE]))) == (
        "**Which to use**, of what is measured. Captured in a CUDA graph, `BucketedDDP(module, "
        '100, communication="copy_engines")` with `optimizer.overlapping(ddp)` around backward: '
        "80.8 ms; 82.0 with the update after backward, as clipping by the norm of all gradients "
        "wants it and 84.8 with gradients sent in bf16, which rounds them. Launched, "
        "`BucketedDDP(module, 100)`: 104 ms (103 to 105), 160 (159 to 161) in PyTorch's DDP; level "
        "with it: during backward, buckets of 10 MB."
    )
    plain = [row(100, "flat", ms_host=95), row(90, "overlapped", capture=True)]
    assert str(choice.sentence(made(plain))) == (
        "**Which to use**, of what is measured. Captured in a CUDA graph, `DDP(module)`: 90.0 ms. "
        "Launched, `FlatDDP(module)`: 100 ms (99.0 to 101). The host takes 95.0 ms to issue it, so "
        "what counts is that messages are few."
    )
    many = [row(100, "flat", ms_host=95), row(101, "naive"), row(101.5, "overlapped")]
    assert str(choice.sentence(made(many))).endswith(
        "level with it: after backward, each by itself; during backward, each by itself. The host "
        "takes 95.0 ms to issue it, so it is the host that is timed, and which of these sends best "
        "is not seen."
    )
    assert "Not measured yet" in str(choice.sentence(empty))
    low = row(85, bucket_mb=100, capture=True, **ENGINES, **LOW)
    (made_so,) = made([low]).table.itertuples()
    assert choice.code(made_so) == (
        'BucketedDDP(module, 100, communication="copy_engines", communication_dtype=torch.bfloat16)'
    )
    assert "; 88.0 by NCCL, for GPUs of several hosts" in str(
        choice.sentence(made([row(82, bucket_mb=100, capture=True, **ENGINES), ROWS[10]]))
    )


def test_what_a_message_costs_the_host(made, empty):
    slow = row(140, "overlapped", ms_host=133.7)
    # 8 messages of 1000 MB, 98 of 100; 427 more than 8 of one for each gradient.
    rows = [row(110, bucket_mb=1000, ms_host=91), row(104, bucket_mb=100, ms_host=100), slow]
    assert [host.messages(one) for one in made(rows).of("xl25", False).itertuples()] == [435, 98, 8]
    said = str(host.sentence(made([*rows, row(150, "naive", ms_host=99.54)])))
    assert said.startswith(
        "Launched, the host takes 134 ms to issue the step of the xl of 2025 with 435 messages "
        "during backward and 91.0 ms with 8, so that a message costs it 0.100 ms; sent after "
        "backward, 0.0200 ms. What it costs more in backward (a hook on autograd's thread, a "
        "stream of its own, a work object to wait for) is not measured apart. In 2 of 3 ways the "
        "host takes at least 90% of the step"
    )
    said = str(host.sentence(made([*rows, row(150, "naive", ms_host=80)])))
    assert "0.100 ms; sent after backward, nothing that is seen. In 2" in said
    said = str(answer.sentence(made([row(130, "naive"), slow])))
    assert "more than they hide: it takes 134 ms to issue that step, and 90.0 ms where" in said
    assert "Not measured yet" in str(host.sentence(empty))
    assert "Not measured yet" in str(host.sentence(made(rows[:1])))
    large = [row(100, "flat", model="2.7B", ms_host=30), row(90, "naive", model="2.7B", ms_host=45)]
    said = str(host.sentence(made([*rows, *large])))
    assert "Of the xl of 2026 (2.7B) it takes 30% to 50% of a step, PyTorch's included" in said
    late = row(90, "naive", model="2.7B", ms_host=88)
    assert "it takes 30%" not in str(host.sentence(made([*rows, large[0], late])))
    # Of another run's host nothing is concluded; what a replay takes is no host's.
    c = made([*rows, row(130, "overlapped", capture=True), row(102, bucket_mb=100, capture=True)])
    assert str(host.sentence(c)).endswith(
        "In 2 of 3 ways the host takes at least 90% of the step to issue it. Replayed, with no "
        "host in it, the step takes 2.00 to 10.0 ms less, and no more than that is the host's."
    )
    c.table.loc[c.table["wrapper"] == "overlapped", "run"] = "another"
    assert "of the xl of 2025 with 98 messages during backward and 91.0" in str(host.sentence(c))


def test_steps_without_communication_that_differ_are_told(made, empty):
    said = str(host.baseline(made(ROWS)))
    assert "For the xl of 2025 it took 100 ms launched and 80.0 ms captured." in said
    assert "says nothing" not in said
    uneven = [row(150, "naive"), row(130, "flat", ms_without=110)]
    said = str(host.baseline(made(uneven)))
    assert "it took 100 to 110 ms launched. What differs when launched is the host" in said
    assert "a difference of less than 10.0 ms between two exposed times says nothing. The" in said
    c = made([*uneven, row(104, "overlapped", ms_without=103), row(148, "naive", capture=True)])
    c.table.loc[c.table["wrapper"] == "flat", "run"] = "2099"
    assert (
        ", and the rows are of 2 runs:\n\n- *naive*; *each*: it took 100 to 103 ms, and steps are "
        "2.00 ms above their replays; a difference of less than 3.00 ms between two exposed times "
        "says nothing\n- *flat*: it took 110 ms\n\nThe steps themselves are the safer comparison"
    ) in str(host.baseline(c))
    assert "Not measured yet" in str(host.baseline(empty))


def test_steps_whose_spreads_overlap_are_level(made):
    rows = [row(108, bucket_mb=1), row(107, bucket_mb=10), row(104, bucket_mb=100)]
    assert str(answer.buckets(made(rows))).endswith(
        "step has 100 MB, 98 messages: 104 ms (103 to 105)."
    )
    rows[1] = row(107, bucket_mb=10, ms_p20=104.5)
    assert str(answer.buckets(made(rows))).endswith("104 ms (103 to 105); level with it: 10 MB.")


def test_the_size_of_a_bucket_by_formula_simulation_and_rows(made, empty):
    c = made(ROWS, collectives=SENT)
    size = 4 * parameter_count(SIZES["xl25"])
    assert buckets.formula_ms(c, 100) == pytest.approx(
        1e3 * (size / (100 * MB) * 40e-6 + 100 * MB / 250e9), rel=1e-3
    )
    # All in one, at the rate of the largest measured.
    assert buckets.simulated_ms(c, 10_000) == pytest.approx(1e3 * size / 250e9, rel=0.02)
    said = str(buckets.verdict(c))
    # 7.99 GB at 250 GB/s.
    assert "backward takes 50.0 ms and the bytes 32.0 ms, so the link waits for gradients" in said
    # Seven matrices and two norms a block, embedding, head and a norm: none has a neighbour that
    # fits beside it.
    assert "those of 1 MB are 435 messages and not 7623." in said
    assert (
        "MB; of those launched the step of 100 MB is the shortest, with those of 10 MB level; of "
        "those replayed the step of 100 MB is the shortest, with those of 10 MB level. By the "
        "formula"
    ) in said
    assert f"100 MB: {buckets.formula_ms(c, 100):.2f}, " in said and "and 4.00 ms" in said
    # 106 over 90 and 104 over 88 ms; 10.0 and 8.00 ms are exposed captured.
    assert "At 10 and 100 MB the launched step waits for the host, which takes 90.0 ms" in said
    assert "which neither model has: the replay takes 16.0 ms less." in said
    assert "Captured, the least is 8.00 ms at 100 MB" in said
    missed = [ms - buckets.simulated_ms(c, mb) for mb, ms in ((100, 8), (10, 10))]
    assert f": {missed[0]:.2f} to {missed[1]:.2f} ms are missed, from 10 to 100 MB. No" in said
    assert said.endswith("to messages beside them, which is our guess for most of it.")
    longer = row(108, bucket_mb=1, ms_communication=45)
    assert str(buckets.verdict(made([longer, ROWS[5]], collectives=SENT))).endswith("and 4.00 ms.")
    assert str(buckets.verdict(made([longer, *ROWS[5:7], ROWS[10]], collectives=SENT))).endswith(
        "Small buckets lose for longer: alone and one after another those of 1 MB travel for 45.0 "
        "ms, those of 1000 MB for 40.0."
    )
    assert "Not measured yet" in str(buckets.verdict(empty))
    found = buckets.table(c, "c", "t").frame.set_index("bucket, MB")
    assert list(found.loc[100])[2:] == ["4.00", "8.00"] and list(found.loc[25])[2:] == ["·", "·"]


def test_the_simulation_has_what_comes_last(made):
    """Where a block takes 2 ms, twice its messages, they and the embedding's are left of the last
    one; a norm's takes the least time measured."""
    slow = [row(104, bucket_mb=100, ms_backward_without=100)]
    sizes = 3 * [4 * 1600 * 6400] + 4 * [4 * 1600**2] + 2 * [MB] + [4 * 10_000 * 1600]
    expected = 1e3 * sum(map(LINE.time_s, sizes))
    c = made(slow, collectives=SENT)
    assert buckets.simulated_ms(c, 1) == pytest.approx(expected, rel=0.1)


def test_a_link_that_is_slower_than_backward_is_told(made):
    slow = [collective(s * MB, 1e3 * (1e-5 + s * MB / 100e9)) for s in (1, 10, 100, 1024)]
    said = str(buckets.verdict(made(ROWS, collectives=slow)))
    assert "the bytes 79.9 ms, so backward ends before the link does" in said


def test_the_figures_hold_the_rows(made, empty):
    c = made(ROWS, collectives=SENT)
    launched, captured = ways.figure(c).figure.axes
    widths = [patch.get_width() for patch in launched.patches]
    assert widths[:4] == [100, 50, 100, 30] and len(captured.patches) == 2 * 6
    (ax,) = buckets.figure(c).figure.axes
    drawn = {line.get_color(): line for line in ax.lines[::-1]}
    measured = drawn[buckets.LOOKS["launched"].colour]
    assert list(measured.get_xdata()) == [1, 10, 100, 1000]
    assert list(measured.get_ydata()) == [8, 6, 4, 12]
    assert len(drawn) == 4
    charts = (ways.figure(c), buckets.figure(c), ways.figure(empty), buckets.figure(empty))
    for chart in charts:
        assert svg.smallest_text(chart._repr_svg_()) >= svg.LEAST_SIZE


def test_another_machine_is_shown_with_all_its_rows(made):
    said = str(local.show(made([row(5, "flat", backend="gloo", model="tiny")], device="cpu")))
    assert "**CPU**: tiny sizes" in said and "| flat |" in said
    assert "CPU: tiny, 2 ranks with gloo, batch 4 each, context 512, bf16, launched" in said


def test_the_page_with_rows_and_without(shown_by, synthetic, strips, tmp_path):
    without = shown_by("ddp", tmp_path)
    assert any("sweep is refused; `papermill notebooks/ddp.ipynb` then" in x for x in without)
    assert sum("Not measured yet" in text for text in without) >= 8
    large = [row(92, bucket_mb=100, capture=True, model="2.7B")]
    full = synthetic.by_hand(
        tmp_path, ddp=[*ROWS, *BESIDE, *large], collectives=SENT, benchmark=ALONE
    )
    for way in timeline.WAYS:
        strips.put(full, *way, rows=strips.replay() if way[2] else strips.blocks()[0])
    with_rows = shown_by("ddp", full)
    assert len(with_rows) == len(without)
    assert not any("Not measured yet on" in text for text in with_rows)
    # 110 us of each of 48 blocks.
    assert any("beside them: 5.28 ms by {ref}`the trace <ddp-lost>`" in text for text in with_rows)
