"""Every check of the modules ``checks_*``: in 2 and in 4 ranks with gloo, which start once for all,
and in 2 with NCCL, there also those for GPUs alone.

To the bit there too: two ranks add in one order. A check that fails leaves the next ones to run
where every rank comes to its end; one that hangs ends its launch, and those behind it fail.
"""

import functools
import sys
from pathlib import Path

import pytest

from a2lib.parallel import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))
import checking  # noqa: E402

LIMIT_S, COLLECTIVE_S = 600, 60
# Device, ranks of the launch, ranks of the check, modules.
GROUPS = [
    ("cpu", 4, 2, checking.MODULES),
    ("cpu", 4, 4, checking.MODULES),
    *(("cuda", 2, 2, modules) for modules in (checking.MODULES, *zip(checking.GPU_MODULES))),
]


@pytest.fixture(scope="module")
def outcomes(rank_env):
    """Device, ranks of the launch and modules to (the ranks that passed, by check and its ranks;
    errors, by the same; what ended the launch, or None)."""

    @functools.cache
    def outcome(device, processes, modules):
        passed, failed, ended = {}, {}, None

        def note(rank, event):
            if "passed" in event:
                passed.setdefault((event["passed"], event["size"]), set()).add(rank)
            else:
                check = event["failed"], event["size"]
                failed.setdefault(check, []).append(f"rank {rank}: {event['error']}")

        options = {"time_limit_s": LIMIT_S, "collective_timeout_s": COLLECTIVE_S}
        options |= {"processes": processes, "device": device, "on_progress": note}
        env = {**rank_env, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRITON_INTERPRET": "0"}
        try:
            launch("checking:run", {"modules": modules}, env=env, **options)
        except LaunchError as error:
            ended = str(error)
        return passed, failed, ended

    return outcome


CASES = []
for device, processes, size, modules in GROUPS:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    for name in checking.names(size, modules):
        case = device, processes, size, modules, name
        CASES.append(pytest.param(*case, id=f"{device}-{size}-{name}", marks=marks))


@pytest.mark.parametrize(("device", "processes", "size", "modules", "name"), CASES)
def test_in_ranks(outcomes, device, processes, size, modules, name):
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < size:
            pytest.skip("needs two GPUs")
    passed, failed, ended = outcomes(device, processes, modules)
    if len(passed.get((name, size), ())) != size:
        why = failed.get((name, size), [ended or "not every rank ran it"])
        pytest.fail("\n".join(why), pytrace=False)
