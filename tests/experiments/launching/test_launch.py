"""Ranks from Python: results, progress, one error that names the cause, and nothing left running.

Ranks without torch, since only torchrun is under test; with it they are in the other files.
"""

import concurrent.futures
import errno
import os
import re
import subprocess
import tempfile
import time

import pytest

from a2lib.experiments.launching import launcher, watch
from a2lib.experiments.launching.channel import Channel, send
from a2lib.experiments.launching.launcher import (
    LaunchError,
    RankFailed,
    TimeLimitPassed,
    launch,
)
from a2lib.experiments.launching.lifeline import FOLDER, PREFIX, is_alive, new_folder
from a2lib.experiments.launching.watch import _how, first_to_fail

LIMIT_S = 120  # far more than a launch takes


@pytest.fixture
def launch_two(rank_env):
    """Two ranks of a function of launched.py."""

    def two(target, **options):
        options = {"processes": 2, "time_limit_s": LIMIT_S, "device": None} | options
        return launch(f"launched:{target}", **options, env=rank_env)

    return two


def test_results_progress_and_output(launch_two):
    events, lines = [], []
    heard = {"on_progress": lambda *x: events.append(x), "on_output": lambda *x: lines.append(x)}
    results = launch_two("talks", arguments={"times": 2}, **heard)
    assert results == [{"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
    assert sorted(events, key=lambda event: event[0]) == [
        (rank, {"step": step}) for rank in (0, 1) for step in (0, 1)
    ]
    assert sorted(lines) == [(r, t) for r in (0, 1) for t in ("no end of line", "printed")]


def test_a_script_may_lie_in_another_folder(monkeypatch, tmp_path):
    (tmp_path / "script.py").write_text("def main():\n    return 1")
    monkeypatch.syspath_prepend(tmp_path)
    assert launch("script:main", processes=1, time_limit_s=LIMIT_S, device=None) == [1]


@pytest.mark.parametrize(
    ("how", "first", "within"),
    [
        ("raises", "rank 1 of 2: SystemExit: no such", 'sys.exit("no such\\nthing")'),
        # Neither an exception nor what torchrun takes for a failure.
        ("exits", "rank 1 of 2: exited with code 0 before its function had returned", "last words"),
    ],
)
def test_a_rank_that_fails(launch_two, tmp_path, monkeypatch, how, first, within):
    monkeypatch.setattr(watch, "END_S", 1)
    with pytest.raises(RankFailed) as caught:
        launch_two("fails", arguments={"how": how, "pids": str(tmp_path)})
    message = str(caught.value)
    assert message.splitlines()[0] == first
    assert within in message
    assert caught.value.rank == 1
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3 and not any(map(is_alive, pids))


def test_a_node_that_nobody_joins(launch_two):
    """The world is smaller than it was said to be."""
    line = "^4 ranks had not finished within the time limit of 1 s; none of this node's had started"
    line += ": tried to connect to 127.0.0.1:1: Connection refused; all nodes must be"
    options = {"time_limit_s": 1, "nodes": 2, "node": 1, "endpoint": "127.0.0.1:1"}
    with pytest.raises(TimeLimitPassed, match=line):
        launch_two("talks", arguments={"times": 0}, **options)


REFUSED = [
    ({"target": "launched"}, "target must be 'module:function'; got 'launched'"),
    ({"target": print}, "target must be 'module:function'; got <built-in function print>"),
    ({"processes": 0}, "processes must be a whole number from 1 to 1024; got 0"),
    ({"processes": 10**6}, "processes must be a whole number from 1 to 1024; got 1000000"),
    ({"nodes": 10**6}, "nodes must be a whole number from 1 to 65536; got 1000000"),
    ({"device": "tpu"}, "device must be 'cpu', 'cuda' or None; got 'tpu'"),
    ({"nodes": 2}, "several nodes need endpoint, the 'host:port' of node 0"),
    ({"node": 1}, "node must be from 0 to 0; got 1"),
    ({"node": "0"}, "node must be from 0 to 0; got '0'"),
]
for name in ("time_limit_s", "collective_timeout_s"):
    words = f"{name} must be from 0.001 to 31,536,000 s, a year; got"
    for value in (0, -1, 1e30, float("inf"), float("nan"), "9"):
        REFUSED.append(({name: value}, f"{words} {value!r}"))
for endpoint in ("host", "host:", ":1", "host:0", "host:65536", "a:b:c", "::1:9"):
    words = f"endpoint must be 'host:port' with a port from 1 to 65535; got {endpoint!r}"
    REFUSED.append(({"nodes": 2, "endpoint": endpoint}, words))


@pytest.mark.parametrize(("change", "message"), REFUSED)
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
    assert first_to_fail({0: (-9, 6), 1: (-9, 6)}, {1: raised}, killed=6) == 1
    assert first_to_fail({0: (-9, 7), 1: (0, 1.9)}, {}, killed=6) == 1
    assert first_to_fail({0: (1, 1), 1: (1, 1)}, {0: late, 1: raised}) == 1
    assert first_to_fail({0: (-15, 1), 1: (1, 1)}, {1: gone}) == 1
    assert first_to_fail({0: (1, 1), 1: (0, 1)}, {0: gone}) == 1
    assert first_to_fail({0: (None, 1), 1: (1, 2)}, {}) == 0


def test_a_signal_without_a_name():
    assert [_how(-9, None), _how(-50, None)] == ["killed by SIGKILL", "killed by signal 50"]


def test_a_flood_ends_with_the_time_limit(launch_two, monkeypatch):
    """However slowly it is heard; a child of rank 1 goes on after the ranks. The error says where
    each stood."""
    heard = []

    def hear(*line):
        heard.append(line)
        time.sleep(0.01)

    class Flooded(watch.Run):
        def wait(self, *limits):
            while len(self.said.keys() & self.ranks.keys()) < 2:  # a start may take any time
                self._hand_on(until=0)
                time.sleep(0.01)
            return super().wait(*limits)

    monkeypatch.setattr(watch, "HEAR_S", 0.1)
    monkeypatch.setattr(launcher, "Run", Flooded)
    with pytest.raises(TimeLimitPassed, match="^2 ranks had not finished") as caught:
        launch_two("floods", time_limit_s=1, on_output=hear)
    assert len(heard) > 2
    assert [rank for rank, _ in heard[-2:]] == [0, 1]
    assert all(re.fullmatch(r"\([\d,]+ more lines, not shown\)", line) for _, line in heard[-2:])
    where = re.findall(r"launched\.py\", line \d+ in floods", str(caught.value))
    assert len(where) == 2 and caught.value.stacks.keys() == {0, 1}, caught.value


def test_a_pipe_is_read_in_bounded_pieces_and_messages_whole(tmp_path):
    out, messages = (Channel(str(tmp_path), 0, kind) for kind in ("out", "messages"))
    try:
        writer = os.open(tmp_path / "0.out", os.O_WRONLY | os.O_NONBLOCK)
        assert os.write(writer, b"\n" + b"x" * 10**6) == 1 << 16  # and no more until it is read
        assert out.lines() == [""]
        os.write(writer, b"y" * 10)
        assert [len(line) for line in out.lines()] == [(1 << 16) + 9]
        os.write(writer, b"last")
        os.close(writer)
        assert out.lines() == [] and out.lines(to_the_end=True) == ["last"]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            sent = threads.submit(send, str(tmp_path), 0, "result", "z" * 10**6)
            lines = []
            while not lines:
                lines = messages.lines()
            sent.result()
        assert lines == [f'["result", "{"z" * 10**6}"]']
    finally:
        out.close()
        messages.close()


def test_a_temporary_folder_that_is_full(tmp_path, monkeypatch):
    def mkfifo(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "mkfifo", mkfifo)
    given = dict(processes=1, time_limit_s=1, device=None)
    with pytest.raises(LaunchError) as caught:
        launch("launched:talks", {"times": "x" * 1000}, **given)
    assert re.fullmatch(
        rf"the temporary folder {re.escape(str(tmp_path))} is full: 1,\d+ bytes wanted for the "
        r"arguments, and 7 files \(No space left on device\); TMPDIR names another",
        str(caught.value),
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_launch_has_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive, lock = new_folder()
    dead, other = new_folder()
    os.close(other)
    strange = tmp_path / f"{PREFIX}of another version"
    strange.mkdir()
    started = [
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, FOLDER: folder})
        for folder in (alive, dead)
    ]
    try:
        mine, own = new_folder()
        os.close(own)
        assert {str(path) for path in tmp_path.iterdir()} == {alive, mine, str(strange)}
        assert [is_alive(process.pid) for process in started] == [True, False]
    finally:
        os.close(lock)
        for process in started:
            process.kill()
            process.communicate()
