"""The programs in examples/, as README.md starts them, but for fewer steps."""

import re

import pytest
from forked import run_script

from a2lib.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """``run(script, *arguments)``: what it prints in an empty folder."""

    def start(script, *arguments, ranks=1, code=0):
        done = run_script(script, *arguments, folder=tmp_path, ranks=ranks)
        assert done.returncode == code, done.printed
        return done.printed

    return start


@pytest.fixture
def example(tmp_path):
    """``example(name, old, new)``: a copy of small batches, with other text in one place."""

    def copy(name, old="", new=""):
        text = (ROOT / "examples" / name).read_text()
        assert old in text
        path = tmp_path / f"changed-{name}" if old else tmp_path / name
        text = re.sub(r"BATCH, CONTEXT = \d+, \d+", "BATCH, CONTEXT = 4, 32", text)
        path.write_text(text.replace(old, new, 1) if old else text)
        return path

    return copy


def losses(printed):
    return list(map(float, re.findall(r"loss ([\d.]+)", printed)))


def test_a_model_learns_and_goes_on_from_its_checkpoint(run, example, tmp_path):
    train = example("train.py")
    whole = losses(run(train, "--steps", "6", "--folder", "whole"))
    assert whole[-1] < 5  # a byte of 256 has 5.5 before it has learnt anything
    run(train, "--steps", "3", "--folder", "parts")
    again = run(train, "--steps", "6", "--folder", "parts", "--resume")
    assert losses(again) == whole
    table = (tmp_path / "parts" / "losses.csv").read_text().splitlines()
    assert len(table) == 7 and (tmp_path / "parts" / "losses.png").stat().st_size > 1000


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_ctrl_c_keeps_the_steps_so_far(run, example, tmp_path, wrapper):
    """Here of the last rank alone, in its third step; all end at the same one."""
    train = example("train.py")
    sent = "if step == 3 and RANK == 1:\n        signal.raise_signal(signal.SIGINT)"
    interrupted = example("train.py", "    began =", f"    {sent}\n    began =")
    options = ["--steps", "5", "--wrapper", wrapper]
    whole = losses(run(train, *options, "--folder", "whole", ranks=2))
    stopped = run(interrupted, *options, ranks=2).splitlines()[-1]
    assert stopped.startswith("stopped at step 3; --resume goes on")
    again = run(train, *options, "--resume", ranks=2)
    assert losses(again) == whole
    assert again.splitlines()[-1].startswith("stopped at step 5; ")
    table = (tmp_path / "build" / f"train-{wrapper}" / "losses.csv").read_text().splitlines()
    assert "".join(line[0] for line in table[1:]) == "12345"


def test_what_cannot_be_trained_is_one_line_before_a_step(run, example, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "losses.csv").write_text("step,loss\n1,5.5\n")
    for words, *options in (
        ("torchrun", "--wrapper", "ddp"),
        ("old has a run: --resume", "--folder", "old"),
        ("new has no run", "--folder", "new", "--resume"),
        ("the run has 1 steps already", "--folder", "old", "--resume", "--steps", "1"),
    ):
        assert words in run(example("train.py"), *options, code=2).splitlines()[-1]


def test_an_own_attention_is_checked_and_timed(run, example):
    printed = run(example("attention.py"))
    assert re.findall(r"^(\S+) +[\d.]+ ms", printed, re.M) == ["mine", "a2lib", "PyTorch"]
    wrong = example("attention.py", "if is_causal:", "if False:")
    assert "mine: o is wrong" in run(wrong, code=1)


def test_a_step_is_profiled(run, example, tmp_path):
    printed = run(example("profile_step.py"))
    assert "forward" in printed and "optimizer" in printed and "aten::mm" in printed
    assert (tmp_path / "build" / "step-trace.json").stat().st_size > 10_000
