"""Which code of ours the flash chapter's parts are of, in words, on rows made by hand."""

import pytest

from a2lib.report.chapters.flash import ages, gaps, reasons
from a2lib.report.chapters.flash.rows import SECOND


@pytest.fixture
def aged(made, one_head, timed, synthetic, tmp_path):
    """Two runs of the H200 and one of the H100; the sweep is of the first, the board's not."""
    synthetic.by_hand(tmp_path, device="cpu")
    newer = synthetic.RUN.replace("nvidia-h200", "cpu")

    def host(make, run, pairs):
        return [make(name, pass_, 1, ms_graph=1, ms_host=ms, run=run)
                for pass_, times in pairs.items()
                for name, ms in zip(("a2lib", "sdpa_cudnn"), times, strict=True)]  # fmt: skip

    def short(*args, **columns):
        return one_head(*args, seq_len=128, **columns)

    sweep = host(short, synthetic.RUN, {"forward": (0.2, 0.1), "end_to_end": (0.6, 0.4)})
    board = host(timed, newer, {"forward": (0.1, 0.1), "end_to_end": (0.5, 0.5)})
    synthetic.by_hand(tmp_path, device=SECOND, flash=[timed("a2lib", "forward", 1)])
    flash = made(flash=[*sweep, *board])
    flash.runs["git"] = "old"
    flash.runs.loc[newer, "git"] = "new"
    return flash, newer


def test_parts_of_other_commits_are_named(aged, made, one_head):
    flash, newer = aged
    said = str(gaps.sentence(flash))
    assert (
        "Ours is not the same code everywhere, by commit: the handout's sweep `old`; the "
        "leaderboard's shape `new`; the same on the H100 `old`. Its times are compared within a "
        "part, but for those of the two GPUs"
    ) in said
    assert "more than one run" not in said
    assert str(ages.machines(flash)) == (
        "On the H200 ours is of commit `new`, on the NVIDIA H100 80GB HBM3 of `old`: where they "
        "differ by little, the code may be why."
    )
    flash.runs["git"] = "one"
    assert "same code" not in str(gaps.sentence(flash)) and str(ages.machines(flash)) == ""
    mixed = [one_head("a2lib", "forward", 1), one_head("eager", "forward", 1, run=newer)]
    said = str(gaps.sentence(made(flash=mixed)))
    assert "In 1 of the sweep's 1 shapes the implementations are of more than one run." in said


def test_the_hosts_part_beside_the_sweeps(aged):
    flash, _ = aged
    said = str(reasons.launches(flash))
    assert (
        "At the leaderboard's shape, measured at commit `new`, the host needs for ours and for "
        "cuDNN forward 0.100 and 0.100 ms and end to end 0.500 and 0.500 ms: forward 1.00 times "
        "cuDNN's and not 2.00 and end to end 1.00 times cuDNN's and not 1.50 as in the sweep. "
        "Between the two, ours began to work out"
    ) in said
    flash.runs["started"] = "2026-11-23T00:00:00Z"
    assert str(reasons.launches(flash)).endswith("and end to end 0.500 and 0.500 ms.")
    flash.runs["git"] = "one"
    assert "At the leaderboard's shape, the host needs for ours" in str(reasons.launches(flash))
