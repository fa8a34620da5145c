"""A sweep measured by several ranks: what becomes of one is a row, and nothing stays behind."""

import json
import os
import re
import signal
import time

import pytest
import torch
from experiments.harness.toy_ranks import IN_GROUP, RANKS, task
from refusals import refused
from waiting import until

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import OnRanks, ParameterError
from a2lib.experiments.harness.process import where, why
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.sweep import Sweep
from a2lib.experiments.launching.launcher import LaunchError, RankFailed, TimeLimitPassed
from a2lib.experiments.launching.lifeline import is_alive
from a2lib.lab import Store
from a2lib.paths import cache_dir

LIMIT_S = 60


@pytest.fixture
def ranks(tmp_path):
    return Store(RANKS, "cpu", data=tmp_path / "data")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the groups have their temporary files; nothing is in it when a test ends."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert _left(folder) == []


def _left(folder):
    """Not the cache of compiled code, which is kept there if this repository's path has a space."""
    return [path for path in folder.iterdir() if path.name != cache_dir().name]


def rows(store):
    return {row["operation"]: (row["status"], row["note"]) for row in store.rows()}


def test_what_a_rank_does_is_the_row_of_its_configuration(ranks, run, tmp_path, folder):
    killed = task("killed", 3, part="killed once", log=str(tmp_path / "log"))
    three = Sweep(ranks, run, "cpu", keep=True)
    three.measure([task("first", 3), task("second", 3), killed, task("last", 3)])
    hangs = task("hangs", 3, part="hang")
    Sweep(ranks, run, "cpu", worker=three.worker, silence_s=1).measure([hangs])
    found = rows(ranks)
    assert [found[name][0] for name in ("first", "second", "killed", "last")] == ["ok"] * 4
    assert found["first"][1] == found["second"][1] and found["killed"][1] == found["last"][1]
    status, note = found["hangs"]
    stood = r"no answer within 1 s: ranks 0, 1, 2 in measure \(toy_ranks.py:\d+\)"
    assert status == "error" and re.fullmatch(stood, note)
    assert (tmp_path / "log").exists()
    assert not any(is_alive(int(note)) for status, note in found.values() if status == "ok")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_ranks_of_a_process_group(tmp_path, run, backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    store = Store(IN_GROUP, "cpu", data=tmp_path / "data")
    parts = {"sum": "late", "raises": "raise"}
    asked = [task(name, backend=backend, part=part) for name, part in parts.items()]
    Sweep(store, run, "cpu", until=time.time() + LIMIT_S).measure(asked)
    found = rows(store)
    status, note = found["sum"]
    total, said, by = re.fullmatch(r"(\S+) (.*) (\S+)", note).groups()
    assert (status, total, by) == ("ok", "3", backend)
    assert [rank for rank, _ in json.loads(said)] == [0, 1]
    # Not rank 0, whose peer is gone.
    assert found["raises"] == ("error", "rank 1 of 2: ValueError: one")


GOING = """
from pathlib import Path
from experiments.harness.toy_ranks import RANKS, task
from a2lib.experiments.harness.sweep import Sweep
from a2lib.lab import Store
store = Store(RANKS, "cpu", data=Path({data!r}))
try:
    sweep = Sweep(store, {run!r}, "cpu")
    sweep.measure([task({name!r}), task("hangs", part="hang", pids={pids!r})])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_two_sweeps_at_once_and_neither_leaves_a_rank(ranks, run, tmp_path, folder, python):
    """One is interrupted, one is killed; their groups know nothing of each other."""
    going, folders = [], []
    for name in ("interrupted", "killed"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        given = {"data": str(ranks.data), "run": run, "pids": str(folders[-1]), "name": name}
        going.append(python(GOING.format(**given)))
    pids = [int(pid) for folder in folders for pid in _two_names(folder)]
    for process, by in zip(going, (signal.SIGINT, signal.SIGKILL), strict=True):
        process.send_signal(by)
    said = [process.communicate(timeout=LIMIT_S)[0] for process in going]
    assert said == ["interrupted\n", ""]
    assert until(lambda: not _left(folder) and not any(map(is_alive, pids)))
    assert {row["operation"] for row in ranks.rows()} == {"interrupted", "killed"}


def _two_names(folder):
    assert until(lambda: len([name for name in os.listdir(folder) if name.isdigit()]) == 2)
    return filter(str.isdigit, os.listdir(folder))


@pytest.mark.parametrize(("error", "raised", "died"), [
    (RankFailed("rank 1 of 2: x\n\nmore", 1, 1), {1: ("oom", "out of memory")},
     ("rank 1 of 2: out of memory", "oom", False)),
    # Rank 0 has lost its peer: it is not to blame.
    (RankFailed("rank 1 of 2: killed by SIGABRT\n\nmore", 1, -6), {0: ("error", "closed")},
     ("rank 1 of 2: killed by SIGABRT", "error", False)),
    (RankFailed("rank 1 of 2: killed by SIGTERM", 1, -15), {},
     ("rank 1 of 2: killed by SIGTERM", "error", True)),
    (LaunchError("torchrun was killed by SIGKILL\n\nmore", code=-9), {},
     ("torchrun was killed by SIGKILL", "error", True)),
    (TimeLimitPassed("no answer within 3 s\n\nmore", {1: "  File \"a.py\", line 2 in f"}), {},
     ("no answer within 3 s: rank 1 in f (a.py:2)", "error", False)),
    (None, {}, ("it stopped answering", "error", False)),
])  # fmt: skip
def test_what_is_said_of_a_group_that_ended(error, raised, died):
    raised = {rank: {"raised": note, "status": status} for rank, (status, note) in raised.items()}
    said = why(error, raised, 2)
    assert (str(said), said.status, said.from_outside) == died


def test_where_ranks_stand():
    said = 'Stack (most recent call first):\n  File "{}", line {} in {}\n  File "/b", line 1 in g'
    waits, works = said.format("/x/c10d.py", 3, "all_reduce"), said.format("<string>", 5, "f")
    assert where({0: waits, 1: works, 2: waits, 3: ""}) == (
        "ranks 0, 2 in all_reduce (c10d.py:3); rank 1 in f (<string>:5); rank 3 in nowhere known"
    )


def test_the_backend_is_that_of_the_machine(gpus):
    def given(n, **values):
        gpus(n)
        return parameters.check({**vars(OnRanks()), **values}, OnRanks).ranks()

    assert given(0) == Ranks(2, "gloo")
    assert given(2) == Ranks(2, "nccl")
    assert given(2, world_size=3) == Ranks(3, "gloo")
    assert given(2, backend="gloo") == Ranks(2, "gloo")
    for n, asked, words in (
        (0, {"backend": "nccl"}, "^world_size = 2 with backend nccl: allowed is gloo"),
        (2, {"world_size": 4, "backend": "nccl"}, "allowed is from 1 to 2, the GPUs here$"),
        (2, {"backend": "none"}, "backend = 'none': allowed are auto, gloo, nccl"),
    ):
        refused(words, given, n, error=ParameterError, **asked)
    assert [Ranks(1, name).device for name in ("gloo", "nccl")] == ["cpu", "cuda"]
