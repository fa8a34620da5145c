"""runs.csv: what a run records, and what it must not."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from tables import by

from a2lib import paths
from a2lib.lab import read_runs, runs, start_run


@pytest.fixture
def new(tmp_path):
    """Start a run in an empty data folder and return its row."""

    def start(**given) -> dict:
        given = {"command": "test", "parameters": {}, "device": "cpu"} | given
        run = start_run(data=tmp_path / "data", **given)
        return by(read_runs(tmp_path / "data"), "run")[run]

    return start


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a git checkout in place of this one, with one commit; returns it and a git command."""
    root = tmp_path / "checkout"
    (root / "data").mkdir(parents=True)

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        command = ["git", *identity, *arguments]
        return subprocess.check_output(command, cwd=root, env=environment, text=True).strip()

    for name in ("code.py", "data/cpu.csv"):
        (root / name).write_text("1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    monkeypatch.setattr(paths, "ROOT", root)
    monkeypatch.delenv("A2LIB_GIT", raising=False)
    return root, git


def test_a_run_records_where_it_ran(new, monkeypatch):
    monkeypatch.setenv("A2LIB_GIT", "abc123")
    row = new(command="papermill notebooks/flash.ipynb", parameters={"seq_len": 16}, n_devices=2)
    assert list(row) == list(runs.COLUMNS)
    assert re.fullmatch(r"\d{8}T\d{6}Z-cpu-[0-9a-f]{6}", row["run"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["started"])
    assert row["run"].startswith(row["started"].replace("-", "").replace(":", ""))
    assert (row["device"], row["n_devices"], row["git"]) == ("cpu", "2", "abc123")
    assert row["torch"] == torch.__version__
    assert row["python"] == ".".join(map(str, __import__("sys").version_info[:3]))
    assert row["command"] == "papermill notebooks/flash.ipynb"
    assert json.loads(row["parameters"]) == {"seq_len": 16}
    odd = {"a\u00a0b": 'c,"d\n\u2028\udc80é'}
    assert json.loads(new(parameters=odd)["parameters"]) == odd
    assert new()["run"] != new()["run"]  # in the same second


def test_no_host_name_and_no_local_path_is_recorded(new, monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(["a", "secret-host", "c", "d", "e"]))
    monkeypatch.setenv("HOSTNAME", "secret-host")
    command = f"{paths.ROOT}/.venv/bin/papermill {tmp_path}/out.ipynb"
    row = new(command=command, parameters={"in": [{f"{tmp_path}/log": paths.ROOT / "build"}]})
    assert row["command"] == ".venv/bin/papermill .../out.ipynb"
    assert json.loads(row["parameters"]) == {"in": [{".../log": "build"}]}
    everything = " ".join(row.values())
    assert "secret-host" not in everything and str(tmp_path) not in everything


def test_local_paths_are_shortened_and_nothing_else(monkeypatch):
    root, home = "/srv/checkouts/a2lib", "/home/somebody"
    monkeypatch.setattr(paths, "ROOT", Path(root))
    monkeypatch.setenv("HOME", home)
    for text, shortened in (
        (f"{root}/build/x.csv", "build/x.csv"),
        (f"--out={root}/x", "--out=x"),
        (f"{root}-other/x", ".../x"),
        ('File "/usr/lib/python3/x.py", line 3', 'File ".../x.py", line 3'),
        (f"{home}/x {home}", "~/x ~"),
        ("5 TFLOP/s and/or 1/2/3, file://a/b", "5 TFLOP/s and/or 1/2/3, file://a/b"),
    ):
        assert runs.scrub(text) == shortened


def test_the_commit_is_that_of_the_checkout(checkout, new, monkeypatch):
    root, git = checkout
    commit = git("rev-parse", "--short=12", "HEAD")
    assert re.fullmatch(r"[0-9a-f]{12}", commit) and new()["git"] == commit
    # Changed code is dirty, changed data is not.
    (root / "data" / "cpu.csv").write_text("2\n")
    (root / "untracked.txt").write_text("2\n")
    assert runs.git_version() == commit
    (root / "code.py").write_text("2\n")
    assert runs.git_version() == f"{commit}-dirty"
    monkeypatch.setenv("A2LIB_GIT", "0123456789ab")
    assert runs.git_version() == "0123456789ab"


def test_without_git_or_a_commit_it_is_blank(checkout, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert runs.git_version() == ""
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert runs.git_version() == ""
