"""Every check of the modules ``checks_*``: in 2 and in 4 ranks with gloo, which start once for all,
in 2 with NCCL, there also those for GPUs alone.

To the bit there too: two ranks add in one order. A check that fails leaves the next ones to run
where every rank comes to its end; one that hangs ends its launch, and those behind it fail.
"""

import functools
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from a2lib.lab import guard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import checking  # noqa: E402

LIMIT_S = 600
# Device, ranks of the group, ranks of the check, modules.
GROUPS = [
    ("cpu", 4, 2, checking.MODULES),
    ("cpu", 4, 4, checking.MODULES),
    *(("cuda", 2, 2, modules) for modules in (checking.MODULES, *zip(checking.GPU_MODULES))),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """``outcomes(device, processes, modules)``: the ranks that passed, by check and number of
    ranks; errors, by the same; how the group ended."""

    @functools.cache
    def outcome(device, processes, modules):
        folder = tmp_path_factory.mktemp("checks")
        ended = run_in_ranks(folder, device, processes, modules)
        passed, failed = {}, {}
        for path in folder.iterdir():
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if "passed" in event:
                    passed.setdefault((event["passed"], event["size"]), set()).add(path.name)
                else:
                    check = event["failed"], event["size"]
                    failed.setdefault(check, []).append(f"rank {path.name}: {event['error']}")
        return passed, failed, ended

    return outcome


def run_in_ranks(folder, device, processes, modules):
    """Run the checks in ranks, and return what these printed, or that the time was up; nothing
    that was started is left."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRITON_INTERPRET": "0"}
    if device != "cpu":
        return launch_on_gpus(folder, device, processes, modules, environment)
    logs = [folder.with_name(f"{folder.name}-rank-{rank}") for rank in range(processes)]
    ranks = forked.Ranks(checking.main, (folder, device, modules), environment, logs)
    in_time = ranks.end_within(LIMIT_S)
    printed = "".join(log.read_text() for log in logs)
    return printed if in_time else f"not over within {LIMIT_S} s: {printed}"


def launch_on_gpus(folder, device, processes, modules, environment):
    """Have torchrun start the ranks: what a forked process has of CUDA is not its own."""
    mark = secrets.token_hex(8)
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(path), guard.VARIABLE: mark}
    environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={processes}", str(HERE / "checking.py")]
    command += [str(folder), device, *modules]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # However this process ends: the watch removes a folder as well, and this one has to stay.
    with guard.watch(mark, folder / "none"):
        process = subprocess.Popen(command, env=environment, **pipes)
        try:
            return process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            guard.kill_marked(mark)
            return f"not over within {LIMIT_S} s: {process.communicate()[0]}"
        finally:
            guard.kill_marked(mark)


CASES = []
for device, processes, size, modules in GROUPS:
    marks = [] if device == "cpu" else [pytest.mark.gpu]
    for name in checking.names(size, modules):
        case = device, processes, size, modules, name
        CASES.append(pytest.param(*case, id=f"{device}-{size}-{name}", marks=marks))


@pytest.mark.parametrize(("device", "processes", "size", "modules", "name"), CASES)
def test_in_ranks(outcomes, device, processes, size, modules, name):
    if device != "cpu":
        import torch

        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
    passed, failed, ended = outcomes(device, processes, modules)
    if len(passed.get((name, size), ())) != size:
        why = failed.get((name, size), ["not every rank ran it", ended[-3000:]])
        pytest.fail("\n".join(why), pytrace=False)
