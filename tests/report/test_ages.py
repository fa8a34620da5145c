"""Which code of ours the flash chapter's parts are of, in words, on rows made by hand."""

import pytest

from a2lib.report.chapters.flash import ages, gaps, reasons
from a2lib.report.chapters.flash.rows import SECOND

NO_H100 = "No H100 was measured; every figure of ours is of one NVIDIA H200."


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


def test_parts_of_other_commits_are_named(aged):
    flash, newer = aged
    said = str(gaps.sentence(flash))
    assert (
        "Ours is not the same code everywhere, by commit: the handout's sweep `old`; the "
        "leaderboard's shape `new`; the same on the H100 `old`. Its times are compared within a "
        "part, but for those of the two GPUs"
    ) in said
    assert "more than one run" not in said and "are of one run" not in said
    assert str(ages.machines(flash)) == (
        "On the H200 ours is of commit `new`, on the NVIDIA H100 80GB HBM3 of `old`: where they "
        "differ by little, the code may be why."
    )
    flash.runs["git"] = "one"
    assert "same code" not in str(gaps.sentence(flash)) and str(ages.machines(flash)) == ""


def test_the_runs_that_the_sweep_mixes(aged, made, one_head, synthetic):
    _, newer = aged
    runs = {"forward": newer, "backward": synthetic.RUN}
    sweep = [
        one_head(name, pass_, 1, seq_len=n, run=run)
        for n in (128, 256)
        for name in ("a2lib", "eager")
        for pass_, run in runs.items()
    ]
    said = str(gaps.sentence(made(flash=sweep)))
    assert said.endswith(
        "In each of the sweep's shapes and passes the implementations are of one run; in 2 of its "
        "2 shapes the passes are of more than one run. " + NO_H100
    )
    sweep[0]["run"] = synthetic.RUN  # ours forward at 128 tokens
    said = str(gaps.sentence(made(flash=sweep)))
    assert said.endswith(
        "In 1 of the sweep's 4 shapes and passes, at 128 tokens, the implementations are of more "
        "than one run, in the others of one; in 2 of its 2 shapes the passes are of more than one "
        "run. " + NO_H100
    )
    one = [one_head("a2lib", "forward", 1), one_head("eager", "forward", 1, run=newer)]
    said = str(gaps.sentence(made(flash=one)))
    assert "In 1 of the sweep's 1 shapes and passes, at 65,536 tokens, the impl" in said
    assert "in the others of one." in said and "the passes are of more" not in said


def test_the_hosts_part_beside_the_sweeps(aged):
    flash, newer = aged
    assert str(reasons.launches(flash)).endswith(
        "At the leaderboard's shape the host needs for ours and for cuDNN forward 0.100 and 0.100 "
        "ms and end to end 0.500 and 0.500 ms, in another run than the sweep's; another host has "
        "other times."
    )
    flash.handout["run"] = newer
    assert str(reasons.launches(flash)).endswith("and end to end 0.500 and 0.500 ms.")
