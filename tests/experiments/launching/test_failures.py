"""Groups that are ended from outside, or cannot come together: one clear error, and nothing left.

What ranks do themselves, without torch, is in test_launch.py.
"""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from waiting import until

from a2lib.experiments.launching.launcher import LaunchError, RankFailed, launch
from a2lib.experiments.launching.lifeline import PREFIX, is_alive

sys.path.insert(0, str(Path(__file__).parent))
from launched import MARK  # noqa: E402

LIMIT_S = 120  # far more than a launch takes
# How long the agent of a launcher that was killed may take to end what it started.
AFTER_S = 15

pytestmark = pytest.mark.slow


@pytest.fixture
def env(rank_env, tmp_path, monkeypatch):
    """The environment of a case, of which nothing may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield {**rank_env, MARK: uuid.uuid4().hex, "TMPDIR": str(tmp_path)}
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def left(env):
    """The processes that run and have the case's mark in their environment or their command."""
    mark = f"{MARK}={env[MARK]}".encode()
    found = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if mark in words(folder.name, "environ") or mark in words(folder.name, "cmdline")
    ]
    return [pid for pid in found if is_alive(pid)]


def words(pid, what):
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []


def error_of(target, env, processes=2, **options):
    with pytest.raises(LaunchError) as caught:
        launch(target, processes=processes, time_limit_s=LIMIT_S, env=env, **options)
    return caught.value


def test_a_rank_killed_while_others_wait_for_it(env):
    error = error_of("launched:trains", env, arguments={"step": 3})
    assert isinstance(error, RankFailed) and error.rank == 1 and error.code == -signal.SIGKILL
    assert str(error).startswith("rank 1 of 2: killed by SIGKILL\n")
    assert left(env) == []


def test_nodes_that_disagree(env):
    """One has a process and one has two: the world is neither's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        endpoint = "{}:{}".format(*found.getsockname())

    def run_node(node):
        options = {"nodes": 2, "node": node, "endpoint": endpoint, "arguments": {"times": 0}}
        return error_of("launched:talks", env, processes=1 + node, device=None, **options)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        errors = [str(error) for error in threads.map(run_node, range(2))]
    for processes, error in enumerate(errors, 1):
        line = (
            rf"rank \d of {2 * processes}: ValueError: the world has 3 ranks, this node was "
            rf"launched for 2 x {processes}; nodes and processes must be the same on every node\n"
        )
        assert re.match(line, error), error
    assert left(env) == []


def test_an_occupied_port(env):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(0)
        endpoint = "{}:{}".format(*bound.getsockname())
        options = {"nodes": 2, "node": 0, "endpoint": endpoint, "device": None}
        error = error_of("launched:talks", env, processes=1, **options)
    assert str(error).startswith(f"the port of endpoint {endpoint} is in use on this node; take a")
    assert left(env) == []


def test_torchrun_killed(env):
    ready = []

    def kill(rank, line):
        ready.append(rank)
        if len(ready) == 2:
            module = b"a2lib.experiments.launching.agent"
            [agent] = [pid for pid in left(env) if module in words(pid, "cmdline")]
            os.kill(agent, signal.SIGKILL)

    error = error_of("launched:stand_ready", env, device=None, on_output=kill)
    assert str(error).startswith("torchrun was killed by SIGKILL")
    assert left(env) == []


@pytest.mark.parametrize("how", ["SIGKILL", "daemon", "SIGINT"])
def test_a_launcher_that_ends(env, how):
    """Whatever its ranks have started; three Ctrl-C are as one."""
    command = [sys.executable, str(Path(__file__).with_name("launched.py")), how]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env}
    ) as process:
        ready = [process.stdout.readline() for _ in range(2)]
        assert sorted(ready) == ["[rank 0] ready\n", "[rank 1] ready\n"]
        if how != "daemon":
            for _ in range(3):
                process.send_signal(getattr(signal, how))
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == (0 if how == "daemon" else -getattr(signal, how))
    assert until(lambda: not left(env), 0 if how == "SIGINT" else AFTER_S)
