"""The checks for two ranks under NCCL, and those for GPUs alone: CUDA graphs, engines, streams.

To the bit there too: two ranks add in one order. A check that fails leaves the next ones to run;
one that hangs ends its launch, and the next launch goes on behind it.
"""

import functools
import sys
import time
from pathlib import Path

import pytest

from a2lib.parallel import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))
import checking  # noqa: E402

pytestmark = pytest.mark.gpu
GROUPS = {**{name: (name,) for name in checking.GPU_MODULES}, "plain": checking.MODULES}
# Where none begins or ends for so long, one hangs. First kernels are loaded or compiled.
SILENCE_S = 40
ALL_S = 200
COLLECTIVE_S = 20


@pytest.fixture(scope="session")
def until():
    return time.monotonic() + ALL_S


@pytest.fixture(scope="module")
def outcomes(rank_env, request, until):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = {i.callspec.params["name"] for i in request.session.items if _here(i)}
    return functools.cache(lambda modules: outcomes_of(modules, wanted, rank_env, until))


def _here(item):
    return item.path == Path(__file__)


def outcomes_of(modules, wanted, rank_env, until, device="cuda"):
    """Each check that ran to its errors: in short, to (rank, whole)."""
    every = checking.names(2, modules)
    left = [name for name in every if name in wanted]
    errors = {}
    while left and time.monotonic() < until:
        passed, began, last = {}, [], []

        def note(rank, event, passed=passed, began=began, last=last, errors=errors):
            last[:] = [time.monotonic()]
            if "began" in event:
                began.append(event["began"])
            elif "passed" in event:
                passed.setdefault(event["passed"], set()).add(rank)
            else:
                shorts = errors.setdefault(event["failed"], {})
                shorts.setdefault(event["short"], []).append((rank, event["error"]))

        def overdue(last=last):  # not before the first event: a cold start takes its time
            silent = last and time.monotonic() > last[0] + SILENCE_S
            return f"no check began or ended for {SILENCE_S} s" if silent else None

        ended = None
        try:
            launch(
                "checking:run",
                {
                    "modules": modules,
                    "leave_out": [name for name in every if name not in left],
                    "go_on": True,
                },
                processes=2,
                time_limit_s=max(1, until - time.monotonic()),
                overdue=overdue,
                collective_timeout_s=COLLECTIVE_S,
                device=device,
                env={**rank_env, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
                on_progress=note,
                on_output=lambda *line: None,
            )
        except LaunchError as error:
            ended = str(error)
        errors |= {name: {} for name in left if len(passed.get(name, ())) == 2}
        unended = [name for name in left if name not in errors]
        # A check that began last is what ended the launch, also where it failed on one rank.
        if unended and (not began or began[-1] in unended):
            errors[began[-1] if began else unended[0]] = {in_short(ended): [("all", ended)]}
        left = [name for name in left if name not in errors]
    return errors


def in_short(ended):
    """The first line of a launch's end, and of each rank's stack where the checks' frames are."""
    first, *rest = (ended or "no error").splitlines()
    frames = [x.strip() for x in rest if "a2lib" in x or "check" in x or x.startswith("rank ")]
    return "\n".join(line[: checking.SHORT] for line in (first, *frames[:8]))


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, modules in GROUPS.items() for name in checking.names(2, modules)],
)
def test_on_two_gpus(outcomes, record_property, group, name):
    failure = outcomes(GROUPS[group]).get(name, {"not run: no time was left": []})
    if failure:
        short = "\n".join(
            f"{', '.join(f'rank {rank}' for rank, _ in whole)}: {short}"
            for short, whole in failure.items()
        )
        record_property("short", short)
        wholes = [whole for by_rank in failure.values() for _, whole in by_rank[:1]]
        pytest.fail("\n".join([short, *wholes]), pytrace=False)
