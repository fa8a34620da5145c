"""Reading hardware counters, with a stand-in for ncu."""

import os

import pytest
from refusals import refused
from waiting import until

from a2lib.measure import counters
from a2lib.parallel.lifeline import is_alive

HEAD = ["ID", "Process ID", "Kernel Name", *counters.METRICS.values()]
UNITS = ["", "", "", "byte", "sector", "%", "%", "%", "%"]


def page(*rows):
    lines = [HEAD, UNITS, *rows]
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a program called ncu first on the path; it is given as the body of a shell script."""

    def put(body):
        script = tmp_path / "ncu"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_kernels_in_order_with_bytes_and_shares(fake_ncu, tmp_path):
    text = page(
        ["0", "7", "forward_kernel", "1,024", "10", "50.5", "12.25", "60", "25"],
        ["1", "7", "void f<int, 4>(float)", "2048", "20", "0", "0", "1", "2"],
    )
    (tmp_path / "page.csv").write_text(f"==PROF== Connected\nthe program's own line\n{text}\n")
    fake_ncu(f"cat {tmp_path}/page.csv")
    first, second = counters.read(["program"])
    assert first == {
        "kernel": "forward_kernel", "device_bytes": 1024,
        "l2_bytes": 320,  # ten sectors of 32 bytes
        "tensor_percent": 50.5, "exp_percent": 12.25, "issue_percent": 60.0, "warps_percent": 25.0,
    }  # fmt: skip
    assert second["kernel"] == "void f<int, 4>(float)"


@pytest.mark.parametrize(("body", "words"), [
    ('echo "==ERROR== ERR_NVGPUCTRPERM: no permission"; exit 1', "ERR_NVGPUCTRPERM"),
    ("exit 3", "ended with 3"),
    ("echo hello", "counted no kernel"),
    ('printf \'"ID","Kernel Name"\\n"0","f"\\n\'', "has no metric"),
    (f"echo '{page(['0', '7', 'f', 'n/a', *'11111'])}'", "ncu gave 'n/a' for dram__bytes.sum"),
])  # fmt: skip
def test_a_failure_is_one_line_that_says_why(fake_ncu, body, words):
    fake_ncu(body)
    refused(words, counters.read, ["program"], error=counters.NsightError)


def test_what_hangs_is_ended_with_all_it_started(fake_ncu, tmp_path):
    fake_ncu(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    words = "did not end within"
    refused(words, counters.read, ["program"], timeout_s=1, error=counters.NsightError)
    child = int((tmp_path / "child").read_text())
    assert until(lambda: not is_alive(child))


def test_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", (f"{tmp_path}/**/ncu",))
    refused("not installed", counters.read, ["program"], error=counters.NsightError)
