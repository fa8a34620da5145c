"""Every check of the modules ``checks_*``, in 2 and in 4 ranks with gloo; each size starts once."""

import functools
import sys
from pathlib import Path

import pytest

from a2lib.parallel import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))
import checking  # noqa: E402

LIMIT_S = 300


@pytest.fixture(scope="module")
def outcomes(rank_env):
    """Number of ranks to (the ranks that passed, by check; the error that ended them, or None)."""

    @functools.cache
    def outcome(size):
        passed = {}

        def note(rank, event):
            if "passed" in event:
                passed.setdefault(event["passed"], set()).add(rank)

        try:
            launch(
                "checking:run",
                processes=size,
                time_limit_s=LIMIT_S,
                collective_timeout_s=60,
                env=rank_env,
                on_progress=note,
            )
        except LaunchError as error:
            return passed, str(error)
        return passed, None

    return outcome


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 4) for name in checking.names(size)]
)
def test_in_ranks(outcomes, size, name):
    passed, error = outcomes(size)
    if passed.get(name, set()) != set(range(size)):
        pytest.fail(error or "not every rank ran it", pytrace=False)
