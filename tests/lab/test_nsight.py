"""Running nsys and ncu, with a script in their place: what they are asked, what comes of it, and
what is said where they fail."""

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
    refuses("Nsight Compute .ncu. is not on the path", nsight.counted, ["program"])


HEAD = ["ID", "Process ID", "Kernel Name", *nsight.METRICS.values()]
UNITS = ["", "", "", "byte", "sector", "%", "%", "%", "%"]


def page(*rows):
    lines = [HEAD, UNITS, *rows]
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a program called ncu first on the path; it is given as the body of a shell script."""

    def put(body):
        write_program(tmp_path / "ncu", f"#!/bin/sh\n{body}\n")
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_kernels_in_order_with_bytes_and_shares(fake_ncu, tmp_path):
    text = page(
        ["0", "7", "forward_kernel", "1,024", "10", "50.5", "12.25", "60", "25"],
        ["1", "7", "void f<int, 4>(float)", "2048", "20", "0", "0", "1", "2"],
    )
    (tmp_path / "page.csv").write_text(f"==PROF== Connected\nthe program's own line\n{text}\n")
    fake_ncu(f"cat {tmp_path}/page.csv")
    first, second = nsight.counted(["program"])
    assert first == {
        "kernel": "forward_kernel",
        "device_bytes": 1024,
        "l2_bytes": 320,  # ten sectors of 32 bytes
        "tensor_percent": 50.5,
        "exp_percent": 12.25,
        "issue_percent": 60.0,
        "warps_percent": 25.0,
    }
    assert second["kernel"] == "void f<int, 4>(float)"


def test_a_failure_is_one_line_that_says_why(fake_ncu):
    not_a_number = page(["0", "7", "f", "n/a", *"11111"])
    for body, words in (
        ('echo "==ERROR== ERR_NVGPUCTRPERM: no permission"; exit 1', "ERR_NVGPUCTRPERM"),
        ("echo hello", "counted no kernel"),
        ('printf \'"ID","Kernel Name"\\n"0","f"\\n\'', "has no metric"),
        (f"echo '{not_a_number}'", "ncu gave 'n/a' for dram__bytes.sum"),
    ):
        fake_ncu(body)
        refuses(words, nsight.counted, ["program"])


def test_what_hangs_is_ended_with_all_it_started(fake_ncu, tmp_path):
    fake_ncu(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    refuses("did not end within 1 s", nsight.counted, ["program"], timeout_s=1)
    child = int((tmp_path / "child").read_text())
    assert until(lambda: not is_alive(child))


def test_each_call_has_the_kernels_behind_its_marker(monkeypatch):
    names = ["before", "spin_kernel(long)", "a", "spin_kernel(long)", "b", "c", "spin_kernel(long)"]
    monkeypatch.setattr(nsight, "counted", lambda *_, timeout_s: [{"kernel": n} for n in names])
    calls = nsight.counted_calls([lambda: None] * 3)
    assert [[kernel["kernel"] for kernel in kernels] for kernels in calls] == [
        ["a"],
        ["b", "c"],
        [],
    ]
    refuses("3 of 2 calls were counted", nsight.counted_calls, [lambda: None] * 2)
