"""What the chapter on data parallelism holds against its targets, by value: rows made by hand."""

import pytest

from a2lib.report.chapters.ddp import Ddp, targets, updates

WITHOUT = {False: 100, True: 80}


def row(ms, wrapper="bucketed", bucket_mb=100, capture=False, **over):
    """A spread of 1 ms on either side; 100 ms launched with nothing sent, captured 80."""
    without = WITHOUT[capture]
    return {
        "wrapper": wrapper, "bucket_mb": bucket_mb, "carrier": "backend", "sent_dtype": "fp32",
        "model": "xl25", "batch": 4, "context": 512, "precision": "bf16", "attention": "flash",
        "compile": "blocks", "capture": str(capture).lower(), "backend": "nccl", "world_size": 2,
        "ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, "n": 20, "ms_without": without,
        "ms_without_p20": without - 1, "ms_without_p80": without + 1, "ms_rank_min": ms,
        "ms_rank_median": ms, "ms_rank_max": ms, "ms_communication": "", "ms_backward_without": "",
        "ms_host": 3 if capture else 90, "conditions": "", "note": "", **over,
    }  # fmt: skip


ENGINES, LOW = {"carrier": "copy_engines"}, {"sent_dtype": "bf16"}
ROWS = [
    row(106, bucket_mb=10), row(104), row(160, "torch_ddp", 25, ms_host=155),
    row(88, capture=True), row(82, capture=True, **ENGINES),
    row(85, capture=True, **ENGINES, **LOW),
]  # fmt: skip
BESIDE = [
    row(80.8, "updating", capture=True, **ENGINES),
    row(84.8, "updating", capture=True, **ENGINES, **LOW),
]
ONE, AFTER, BOTH = targets.ONE, targets.AFTER, targets.BESIDE


def of_one(mode, ms):
    return {"model": "xl25", "context": 512, "batch": 4, "mode": mode, "precision": "bf16",
            "attention": "flash", "compile": "blocks", "capture": "true", "warmup": 5,
            "phase": "step", "ms": ms, "n": 9}  # fmt: skip


# One GPU's step takes 0.95 of its time with the update beside its backward: of 80 ms 76.
ALONE = [of_one("train-step", 60), of_one("overlapped-step", 57)]


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows, **sections):
        return Ddp([synthetic.by_hand(tmp_path, ddp=rows, **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Ddp([tmp_path])


def cells(c, *columns):
    """Of each line those columns: 0 ours, 1 against, 2 at most, 3 ratio, 4 verdict, 5 spread and 6
    with nothing sent."""
    found = targets.table(c, "c", "t").frame.values.tolist()
    return [[line[i] for i in columns] for line in found]


def test_targets_are_ratios_and_say_when_they_are_missed(made, empty):
    # 82 / 80, 85 / 80, 104 / 160, 82 / 160; with nothing sent 100 / 160 and 80 / 160. Over steps
    # that send nothing: 1.04 and 1.025 / 1.6, which are no targets.
    assert cells(made(ROWS), 2, 3, 4, 5, 6) == [
        ["1.10", "**1.025**", "**met**", "1.000 to 1.051", "1.000"],
        ["1.05", "**1.062**", "**missed**", "1.037 to 1.089", "1.000"],
        ["0.70", "**0.650**", "**met**", "0.640 to 0.660", "0.625"],
        ["0.70", "0.650", "within", "·", "0.625"],
        ["0.55", "**0.512**", "**met**", "0.503 to 0.522", "0.500"],
        ["0.55", "0.641", "above", "·", "0.625"],
    ]
    said = str(targets.sentence(made(ROWS)))
    assert said.startswith(
        "Of the 4 targets that are measured 3 are met: 1.025 (captured, fp32, of the captured step "
        "of one GPU; at most 1.10), 0.650 (launched, fp32, of PyTorch's, launched; at most 0.70) "
        "and 0.512 (captured, fp32, of PyTorch's, launched; at most 0.55). Missed: 1.062 "
        "(captured, bf16, of the captured step of one GPU; at most 1.05). The limit lies within "
        "the spread of 1.062 (captured, bf16, against one GPU).\n\nLaunched, ours takes 0.650 of "
        "PyTorch's step (0.640 to 0.660 by their spreads). The step without communication took 100 "
        "ms beside ours and 100 ms beside PyTorch's: each over its own, ours takes 0.650. The host "
    )
    assert "90.0 ms to issue our step and 155 ms to issue that of PyTorch's wrapper, of 104" in said
    assert "where these are close, it is the host that is timed" in said
    ahead = [row(104), row(160, "torch_ddp", 25, ms_host=120)]
    assert "104 and 160 ms: it is ahead of both" in str(targets.sentence(made(ahead)))
    assert cells(empty, 3, 4, 5, 6) == [["·"] * 4] * 4
    assert "Not measured yet" in str(targets.sentence(empty))


def test_a_step_that_updates_beside_the_messages_is_held_against_one_gpu_both_ways(made):
    unknown = cells(made([*ROWS, *BESIDE]), 1, 3, 4, 6)
    assert unknown[:2] == [[ONE, "**1.010**", "**met**", "·"], [BOTH, "·", "·", "·"]]
    c = made([*ROWS, *BESIDE], benchmark=ALONE)
    # 80.8 and 84.8 over 80, and over 76; 82 and 85 over 80.
    assert cells(c, 0, 1, 2, 3, 4, 6)[:6] == [
        ["captured, fp32", ONE, "1.10", "**1.010**", "**met**", "0.950"],
        ["captured, fp32", BOTH, "1.10", "1.063", "within, two runs", "1.000"],
        ["captured, fp32", AFTER, "1.10", "1.025", "within", "1.000"],
        ["captured, bf16", ONE, "1.05", "**1.060**", "**missed**", "0.950"],
        ["captured, bf16", BOTH, "1.05", "1.116", "above, two runs", "1.000"],
        ["captured, bf16", AFTER, "1.05", "1.062", "above", "1.000"],
    ]
    # 80.8 over 160, where nothing sent is 76 over 160; 80.8 / 76 over 1.6; 82 over 160.
    assert cells(c, 1, 3, 4, 6)[8:] == [
        ["PyTorch", "**0.505**", "**met**", "0.475"],
        ["PyTorch, each over its own", "0.664", "above, two runs", "0.625"],
        ["PyTorch, both update after", "0.512", "within", "0.500"],
    ]
    assert (
        "at most 1.05). The one GPU of these updates after backward, while ours updates beside the "
        "messages. Stricter, over one GPU that updates beside its backward as well, it is 1.063 "
        "(captured, fp32, within 1.10) and 1.116 (captured, bf16, above 1.05)."
    ) in str(targets.sentence(c))
    slower = made([*ROWS, row(83, "updating", capture=True)], benchmark=ALONE)
    assert cells(slower, 1, 3)[:2] == [[ONE, "**1.025**"], [ONE, "**1.062**"]]
    assert "Stricter" not in str(targets.sentence(slower))


def test_the_same_update_on_one_gpu_is_taken_from_the_row_where_it_has_one(made):
    rows = [row(80.8, "updating", capture=True, ms_without_updating=70, **ENGINES)]
    c = made([*ROWS, *rows], benchmark=ALONE)
    # Of 70 ms no spread is stored.
    assert cells(c, 3, 4, 5, 6)[:2] == [
        ["**1.010**", "**met**", "0.985 to 1.035", "0.875"],
        ["1.154", "above", "1.140 to 1.169", "1.000"],
    ]
    assert "it is 1.154 (captured, fp32, above 1.10)." in str(targets.sentence(c))
    assert "is spared 10.0 ms by the same, measured in turns with these" in str(updates.sentence(c))


def test_a_limit_below_the_step_that_sends_nothing_cannot_be_met(made):
    rows = [row(104), row(82, capture=True), row(125, "torch_ddp", 25)]
    # 100 / 125 and 80 / 125.
    assert (
        "No way to send can meet 2 of them here: our step that sends nothing is 0.800 (launched, "
        "fp32, at most 0.70) and 0.640 (captured, fp32, at most 0.55) of PyTorch's, which exposes "
        "25.0 of its 125 ms, and no more is there to hide."
    ) in str(targets.sentence(made(rows)))
    assert "No way to send" not in str(targets.sentence(made(ROWS)))


def test_ratios_of_two_runs_say_so(made):
    c = made(ROWS)
    c.table.loc[c.table["wrapper"] == "torch_ddp", "run"] = "another"
    apart = ["**met, two runs**", "within, two runs", "**met, two runs**", "above, two runs"]
    assert [found for (found,) in cells(c, 4)] == ["**met**", "**missed**", *apart]
