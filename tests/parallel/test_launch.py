"""Ranks from Python: results, progress, one error that names the cause, and nothing left running.

Ranks without torch, since only torchrun is under test; with it they are in the other files.
"""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from a2lib.parallel import LaunchError, RankFailed, TimeLimitPassed, launch
from a2lib.parallel.launcher import first_to_fail

LIMIT_S = 120  # far more than a launch takes


def alive(folder):
    """The processes whose number is a file's name in ``folder`` and that still run."""
    states = {}
    for pid in os.listdir(folder):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            continue
        states[int(pid)] = stat.rpartition(")")[2].split()[0]
    return [pid for pid, state in states.items() if state not in "ZX"]


def until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_results_progress_and_output(rank_env):
    events, lines = [], []
    results = launch(
        "launched:talks",
        {"times": 2},
        processes=2,
        time_limit_s=LIMIT_S,
        device=None,
        env=rank_env,
        on_progress=lambda *event: events.append(event),
        on_output=lambda *line: lines.append(line),
    )
    assert results == [{"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
    assert sorted(events, key=lambda event: event[0]) == [
        (rank, {"step": step}) for rank in (0, 1) for step in (0, 1)
    ]
    assert sorted(lines) == [(r, t) for r in (0, 1) for t in ("no end of line", "printed")]


@pytest.mark.parametrize(
    ("how", "first", "within"),
    [
        ("raises", "rank 1 of 2: LookupError: no such", 'raise LookupError("no such\\nthing")'),
        ("is killed", "rank 1 of 2: killed by SIGKILL", "last words"),
    ],
)
def test_a_rank_that_fails(rank_env, tmp_path, how, first, within):
    with pytest.raises(RankFailed) as caught:
        launch(
            "launched:fails",
            {"how": how, "pids": str(tmp_path)},
            processes=2,
            time_limit_s=LIMIT_S,
            device=None,
            env=rank_env,
        )
    message = str(caught.value)
    assert message.splitlines()[0] == first
    assert within in message
    assert caught.value.rank == 1
    assert len(os.listdir(tmp_path)) == 3 and alive(tmp_path) == []


def test_the_time_limit_ends_the_group_and_says_where_it_stood(rank_env, tmp_path):
    with pytest.raises(TimeLimitPassed) as caught:
        launch(
            "launched:fails",
            {"how": "stands still", "pids": str(tmp_path)},
            processes=2,
            time_limit_s=20,
            device=None,
            env=rank_env,
        )
    message = str(caught.value)
    assert message.startswith("2 ranks had not finished within the time limit of 20 s")
    assert len(re.findall(r"launched\.py\", line \d+ in stand_still", message)) == 2, message
    assert len(os.listdir(tmp_path)) == 3 and alive(tmp_path) == []


def test_a_killed_launcher_leaves_no_rank(rank_env, tmp_path, tmp_path_factory):
    launcher = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("killed.py"), tmp_path],
        # Its folder of files does stay.
        env={**os.environ, **rank_env, "TMPDIR": str(tmp_path_factory.mktemp("left"))},
    )
    until(lambda: len(os.listdir(tmp_path)) == 3)
    ranks = alive(tmp_path)
    assert len(ranks) == 3
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    # What a rank started is not the launcher's to end once it is killed; see the module.
    started = [pid for pid in ranks if "-c" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    until(lambda: alive(tmp_path) == started)
    os.kill(started[0], signal.SIGKILL)


def test_two_nodes_meet(rank_env):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{found.getsockname()[1]}"

    def one(node):
        return launch(
            "launched:talks",
            {"times": 0},
            processes=1,
            time_limit_s=LIMIT_S,
            device=None,
            env=rank_env,
            nodes=2,
            node=node,
            endpoint=endpoint,
        )

    with concurrent.futures.ThreadPoolExecutor() as threads:
        results = [result for (result,) in threads.map(one, range(2))]
    assert sorted(result["rank"] for result in results) == [0, 1]
    assert {result["world"] for result in results} == {2}


def test_a_node_that_nobody_joins(rank_env):
    """The world is smaller than it was said to be."""
    with pytest.raises(TimeLimitPassed, match="^2 ranks .* none of this node's had started: all"):
        launch(
            "launched:talks",
            {"times": 0},
            processes=1,
            time_limit_s=8,
            device=None,
            env=rank_env,
            nodes=2,
            endpoint="127.0.0.1:0",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "launched"}, "target must be 'module:function'; got 'launched'"),
        ({"processes": 0}, "processes must be a whole number from 1 on; got 0"),
        ({"time_limit_s": 0}, "time_limit_s must be above 0; got 0"),
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or None; got 'tpu'"),
        ({"nodes": 2}, "several nodes need endpoint, the 'host:port' of node 0"),
        ({"node": 1}, "node must be from 0 to 0; got 1"),
    ],
)
def test_refused_before_anything_starts(change, message):
    options = {"target": "launched:talks", "processes": 1, "time_limit_s": 1, "device": None}
    options |= change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        launch(options.pop("target"), **options)


def test_who_was_first():
    raised = {"error": "ValueError: x", "time": 2.0}
    gone = {"error": "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1", "time": 1.0}
    late = {**raised, "time": 3.0}
    assert first_to_fail({0: (1, 1), 1: (1, 1)}, {0: gone, 1: raised}) == 1
    assert first_to_fail({0: (1, 1), 1: (-9, 1)}, {0: gone}) == 1
    assert first_to_fail({0: (-15, 1), 1: (3, 1)}, {}) == 1
    assert first_to_fail({0: (-9, 7), 1: (3, 1)}, {}) == 1
    assert first_to_fail({0: (1, 1), 1: (1, 1)}, {0: late, 1: raised}) == 1
    assert first_to_fail({0: (-15, 1), 1: (1, 1)}, {1: gone}) == 1


def test_what_a_notebook_shows():
    error = LaunchError("first\n\nTraceback", 1)
    assert error._render_traceback_() == ["LaunchError: first\n\nTraceback"]
