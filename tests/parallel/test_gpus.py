"""The checks for two ranks under NCCL, and those for GPUs alone: CUDA graphs, engines, streams.

To the bit there too: two ranks add in one order. A check that fails, or hangs until its launch's
limit, ends that launch; the next one goes on behind it, so that one run tells of every check.
"""

import functools
import sys
from pathlib import Path

import pytest

from a2lib.parallel import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))
import checking  # noqa: E402

pytestmark = pytest.mark.gpu
GROUPS = {"plain": checking.MODULES, **{name: (name,) for name in checking.GPU_MODULES}}
# A launch takes seconds, and a first kernel of each kind is loaded or compiled.
LIMIT_S = 110
MOST_LAUNCHES = 4


@pytest.fixture(scope="module")
def outcomes(rank_env):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    @functools.cache
    def outcome(modules):
        """Check to the error that ended it, None where both ranks passed."""
        every = checking.names(2, modules)
        result = {}
        for _ in range(MOST_LAUNCHES):
            passed, began = {}, []

            def note(rank, event, passed=passed, began=began):
                if "began" in event:
                    began.append(event["began"])
                else:
                    passed.setdefault(event["passed"], set()).add(rank)

            error = None
            try:
                launch(
                    "checking:run",
                    {"modules": modules, "leave_out": list(result)},
                    processes=2,
                    time_limit_s=LIMIT_S,
                    collective_timeout_s=30,
                    device="cuda",
                    env={**rank_env, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
                    on_progress=note,
                )
            except LaunchError as ended:
                error = str(ended)
            result |= {name: None for name, ranks in passed.items() if len(ranks) == 2}
            left = [name for name in every if name not in result]
            if not left:
                return result
            # The first that did not pass is what ended it.
            result[next((name for name in left if name in began), left[0])] = error or "not run"
        return result

    return outcome


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, modules in GROUPS.items() for name in checking.names(2, modules)],
)
def test_on_two_gpus(outcomes, group, name):
    error = outcomes(GROUPS[group]).get(name, "not run: too many before it failed")
    if error:
        pytest.fail(error, pytrace=False)
