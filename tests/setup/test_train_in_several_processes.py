"""The README's training in several processes, and that its commands ask for the same."""

import re

import pytest
from forked import run_script

from a2lib.paths import ROOT

LIMIT_S = 180
SECTION = (ROOT / "README.md").read_text().partition("## Train in several processes")[2]
[PROGRAM] = re.findall(r"```python\n(.*?)```", SECTION, re.S)
[SCRIPT] = re.findall(r"```bash\n(#!.*?)```", SECTION, re.S)
OPTION = re.compile(r"--[a-z-]+")
COMMANDS = re.findall(r"^    (torchrun .*)$", SECTION, re.M)

pytestmark = pytest.mark.slow


def losses_in(text):
    """Return what the ranks print, by rank and world size."""
    found = {}
    for rank, size, loss in re.findall(r"rank (\d) of (\d): loss (\d\.\d+)", text):
        found[int(rank), int(size)] = loss
    return found


def test_two_processes_on_one_machine(tmp_path):
    """The program of the command, in ranks as torchrun starts them."""
    [command] = [line for line in COMMANDS if "--nproc-per-node 2" in line]
    assert command.split()[-1] == "train.py"
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run_script(tmp_path / "train.py", folder=tmp_path, ranks=2, seconds=LIMIT_S)
    assert done.returncode == 0, done.printed
    printed = losses_in(done.printed)
    assert set(printed) == {(0, 2), (1, 2)}
    assert printed[0, 2] != printed[1, 2]  # each has a batch of its own


def test_two_machines_are_asked_for_as_by_the_slurm_script():
    asked = {tuple(OPTION.findall(line)) for line in COMMANDS if "--nnodes 2" in line}
    assert asked == {tuple(OPTION.findall(SCRIPT.partition("torchrun")[2]))}
