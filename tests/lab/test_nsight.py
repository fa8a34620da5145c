"""Running nsys, with a script in its place: what it is asked, what comes of it, and what is said
where it fails."""

import functools
import os

import pytest
from programs import write_program
from refusals import refused
from waiting import is_alive, until

from a2lib.lab import nsight

refuses = functools.partial(refused, error=nsight.ProgramError)

# `profile` runs the command after the options and leaves a report, `export` a file of its name.
FAKE = """#!/usr/bin/env bash
echo "$@" >>"$0.asked"
for word in "$@"; do case $word in --output=*) output=${word#--output=} ;; esac; done
if [ "$1" = profile ]; then
  while [ "${2#-}" != "$2" ]; do shift; done
  "${@:2}"; code=$?
  BODY
  exit $code
fi
echo exported >"$output"
"""
GOOD = 'echo "Generating"; echo report >"$output.nsys-rep"'


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """``nsys(body)`` puts a script in the place of nsys; ``.asked`` beside it has its arguments."""

    def make(body=GOOD):
        path = tmp_path / "nsys"
        write_program(path, FAKE.replace("BODY", body))
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return path

    return make


def test_a_command_and_its_export(nsys, tmp_path):
    script = nsys()
    (tmp_path / "r.sqlite").write_text("old")
    path, printed = nsight.record(["echo", "said"], tmp_path / "r", timeout_s=20)
    assert path == tmp_path / "r.sqlite" and path.read_text() == "exported\n"
    assert printed.splitlines() == ["said", "Generating"]
    profile, export = (tmp_path / f"{script.name}.asked").read_text().splitlines()
    assert profile.startswith("profile --trace=cuda,nvtx --sample=none")
    assert profile.endswith(f"--output={tmp_path / 'r'} echo said")
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in profile
    assert export.endswith(f"--output={path} {tmp_path / 'r.nsys-rep'}")


def test_what_goes_wrong_is_one_line(nsys, tmp_path):
    for body, command, words in (
        ("true", ["echo", "said"], "^nsys profile left no report: said$"),
        (GOOD, ["bash", "-c", "exit 3"], "^nsys profile ended with 3: Generating$"),
    ):
        nsys(body)
        refuses(words, nsight.record, command, tmp_path / "r", timeout_s=20)


def test_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsight.find() is None
    words = "Nsight Systems .nsys. is not on the path"
    refuses(words, nsight.record, ["true"], tmp_path / "r", timeout_s=1)


def test_what_hangs_is_ended_with_all_it_started(nsys, tmp_path):
    nsys(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    refuses("did not end within 1 s", nsight.record, ["true"], tmp_path / "r", timeout_s=1)
    child = int((tmp_path / "child").read_text())
    assert until(lambda: not is_alive(child))
