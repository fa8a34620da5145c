"""The README's training in several processes under its Slurm script, both copied literally, but for
the number of processes on a CPU."""

import os
import re
import signal
import subprocess
import sys

import pytest
from programs import write_program

from a2lib.paths import ROOT

LIMIT_S = 120
# Slurm's own two commands, for two nodes that are both this host. As srun does, the second starts
# its command once a node, and its exit code is the largest.
SLURM = {
    "scontrol": 'test "$*" = "show hostnames both" && printf "127.0.0.1\\nother\\n"',
    "srun": """
shift
SLURM_NNODES=2 SLURM_NODEID=1 "$@" > other.txt &
SLURM_NNODES=2 SLURM_NODEID=0 "$@" > first.txt
code=$?
wait $! || code=$?
exit $code""",
}


@pytest.mark.slow
def test_two_agents_of_a_slurm_job_on_one_host(rank_env, tmp_path):
    text = (ROOT / "README.md").read_text()
    section = text.partition("## Train in several processes")[2]
    [program] = re.findall(r"```python\n(.*?)```", section, re.S)
    [script] = re.findall(r"```bash\n(#!.*?)```", section, re.S)
    two = "torch.cuda.device_count() or 2"
    assert two in program
    (tmp_path / "train.py").write_text(program.replace(two, "1"))
    (tmp_path / "train.sbatch").write_text(script)
    commands = {**SLURM, "python": f'exec "{sys.executable}" "$@"'}
    for name, lines in commands.items():
        write_program(tmp_path / "bin" / name, f"#!/bin/bash\n{lines}\n")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "both"}
    env = {**os.environ, **rank_env, "CUDA_VISIBLE_DEVICES": "", "PATH": path, **slurm}
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", "train.sbatch"], cwd=tmp_path, env=env, **options) as running:
        try:
            said = running.communicate(timeout=LIMIT_S)[1]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    assert (running.returncode, said) == (0, "")
    texts = [(tmp_path / name).read_text() for name in ("first.txt", "other.txt")]
    losses = [re.findall(r"\d\.\d+", text) for text in texts]
    assert [len(own) for own in losses] == [1, 1]
    assert losses[0] != losses[1]  # each rank has a batch of its own
