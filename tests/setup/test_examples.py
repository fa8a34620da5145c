"""The programs in examples/, as README.md starts them, but for fewer steps."""

import os
import re
import subprocess
import sys

import pytest

from a2lib.paths import ROOT

LIMIT_S = 240
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """``run(*arguments)``: what `python ARGUMENTS` prints in an empty folder."""

    def start(*arguments, code=0):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=env, timeout=LIMIT_S, **pipes)
        assert done.returncode == code, done.stdout
        return done.stdout

    return start


def example(name):
    return str(ROOT / "examples" / name)


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_a_model_learns_and_goes_on_from_its_checkpoint(run, tmp_path):
    whole = run(example("train.py"), "--steps", "20", "--folder", "whole")
    assert len(losses(whole)) == 2 and losses(whole)[0] > losses(whole)[1] > 0
    run(example("train.py"), "--steps", "10", "--folder", "parts")
    again = run(example("train.py"), "--steps", "20", "--folder", "parts", "--resume")
    assert losses(again) == losses(whole)[1:]
    table = (tmp_path / "parts" / "losses.csv").read_text().splitlines()
    assert len(table) == 21 and (tmp_path / "parts" / "losses.png").stat().st_size > 1000


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes_go_on_from_their_checkpoint(run, wrapper):
    options = ["--wrapper", wrapper, "--folder", "run", "--steps"]
    run(*TORCHRUN, example("train.py"), *options, "3")
    printed = run(*TORCHRUN, example("train.py"), *options, "5", "--resume")
    assert "step 5, loss" in printed and printed.count("loss") == 1


def test_wrappers_need_several_processes(run):
    assert "torchrun" in run(example("train.py"), "--wrapper", "ddp", code=2).splitlines()[-1]


def test_an_own_attention_is_checked_and_timed(run, tmp_path):
    printed = run(example("attention.py"))
    assert re.findall(r"^(\S+) +[\d.]+ ms", printed, re.M) == ["mine", "a2lib", "PyTorch"]
    text = (ROOT / "examples" / "attention.py").read_text()
    assert "if is_causal:" in text
    (tmp_path / "wrong.py").write_text(text.replace("if is_causal:", "if False:", 1))
    assert "mine: o is wrong" in run("wrong.py", code=1)


def test_a_step_is_profiled(run, tmp_path):
    printed = run(example("profile_step.py"))
    assert all(phase in printed for phase in ("forward", "aten::mm"))
    assert (tmp_path / "build" / "step-trace.json").stat().st_size > 10_000
