"""The README's training in several processes by its own commands, but for the number of processes
and the other machine, which is this one."""

import os
import re
import subprocess
import sys

import pytest
from forked import run_script
from programs import write_program

from a2lib.paths import ROOT

LIMIT_S = 180
SECTION = (ROOT / "README.md").read_text().partition("## Train in several processes")[2]
[PROGRAM] = re.findall(r"```python\n(.*?)```", SECTION, re.S)
[SCRIPT] = re.findall(r"```bash\n(#!.*?)```", SECTION, re.S)
# A program that says what the two torchruns, which meet, made of it; PyTorch takes seconds to load.
MEET = """
import os
print("rank {RANK} of {WORLD_SIZE}: loss 0.0".format_map(os.environ))
"""
OPTION = re.compile(r"--[a-z-]+")
COMMANDS = re.findall(r"^    (torchrun .*)$", SECTION, re.M)
# Slurm's own two commands. As srun does, the second starts its command once a node, and its exit
# code is the largest.
SLURM = {
    "scontrol": 'test "$*" = "show hostnames both" && printf "127.0.0.1\\nother\\n"',
    "srun": """
shift
SLURM_NNODES=2 SLURM_NODEID=1 "$@" &
SLURM_NNODES=2 SLURM_NODEID=0 "$@"
code=$?
wait $! || code=$?
exit $code""",
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
}

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """``start(command)``: a process in this folder, its output captured."""
    for name, lines in SLURM.items():
        write_program(tmp_path / "bin" / name, f"#!/bin/bash\n{lines}\n")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "both"}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PATH": path, "OMP_NUM_THREADS": "1", **slurm}
    started = []

    def begin(command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def losses_in(text):
    """Return what the ranks print, by rank and world size."""
    found = {}
    for rank, size, loss in re.findall(r"rank (\d) of (\d): loss (\d\.\d+)", text):
        found[int(rank), int(size)] = loss
    return found


def test_two_processes_on_one_machine(tmp_path):
    """The program of the command, in ranks as torchrun starts them; its own start: a Slurm job."""
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


def test_a_slurm_job(start, tmp_path):
    assert "--nproc-per-node 8" in SCRIPT
    (tmp_path / "train.sbatch").write_text(SCRIPT.replace("per-node 8", "per-node 1"))
    (tmp_path / "train.py").write_text(MEET)  # the program itself trains above
    job = start(["bash", "train.sbatch"])
    text, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, text
    assert set(losses_in(text)) == {(0, 2), (1, 2)}
