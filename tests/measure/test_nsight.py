"""Running nsys, with a script in its place: what it is asked, and what is said where it fails."""

import pytest
from refusals import refused

from a2lib.measure import nsight

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
        path.write_text(FAKE.replace("BODY", body))
        path.chmod(0o755)
        monkeypatch.setenv(nsight.VARIABLE, str(path))
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
    for body, command, timeout_s, words, stuck in (
        ("true", ["echo", "said"], 20, "^nsys profile left no report: said$", False),
        (GOOD, ["bash", "-c", "exit 3"], 20, "^nsys profile ended with 3: Generating$", False),
        (GOOD, ["sleep", "1"], 0.2, "did not end within 0.2 s", True),
    ):
        nsys(body)
        given = {"timeout_s": timeout_s, "error": nsight.NsightError}
        assert refused(words, nsight.record, command, tmp_path / "r", **given).stuck is stuck


def test_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv(nsight.VARIABLE, str(tmp_path / "nowhere"))
    refused("which is no program; name nsys", nsight.find, error=nsight.NsightError)
    monkeypatch.delenv(nsight.VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "PLACES", (str(tmp_path / "opt" / "*" / "bin" / "nsys"),))
    assert nsight.find() is None
    words, given = "is not found; .A2LIB_NSYS can name it", {"timeout_s": 1}
    refused(words, nsight.record, ["true"], tmp_path / "r", **given, error=nsight.NsightError)
    for version in ("2024.1", "2025.3"):
        program = tmp_path / "opt" / version / "bin" / "nsys"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    assert nsight.find() == str(program)
