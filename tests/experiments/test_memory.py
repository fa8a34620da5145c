"""How much memory the CPU needs, and what tells that it ran out."""

import json
import subprocess
import sys

import pytest

from a2lib.attention import tiled
from a2lib.experiments import memory
from a2lib.experiments.shapes import Shape
from a2lib.theory.attention import PASSES

CASES = [
    (name, dtype, passes, sizes)
    for name, sizes in {
        "eager": (1, 4, 2048, 32),
        "tiled": (1, 64, 384, 64),
        "sdpa_flash": (4, 32, 512, 32),
    }.items()
    for dtype in ("fp32", "bf16")
    for passes in (("forward",), PASSES)
]

# Each case in a fork of its own: the peak of a process never falls.
MEASURING = """
import gc, json, os, resource, sys
import torch
from a2lib.experiments import memory
from a2lib.experiments.comparison import Comparison
from a2lib.experiments.shapes import Shape
torch.set_num_threads(1)
memory.available_bytes = memory.total_bytes = lambda *_: 1 << 60
TIMING = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 1}
def measure(name, dtype, passes, sizes):
    rows = []
    shape = Shape(dtype, *sizes, True)
    Comparison(shape, {name: tuple(passes)}, "cpu", rows.append, timing=TIMING).run()
    assert [row["status"] for row in rows] == ["ok"] * len(passes), rows
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for name, dtype, passes, sizes in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        measure(name, dtype, passes, (1, 1, 64, sizes[3]))  # loads what is loaded once
        before = peak()
        measure(name, dtype, passes, sizes)
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
def test_the_estimate_is_a_bound_within_about_a_factor_of_two():
    done = subprocess.run(
        [sys.executable, "-c", MEASURING, json.dumps(CASES)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    for (name, dtype, passes, sizes), measured in zip(CASES, peaks, strict=True):
        shape = Shape(dtype, *sizes, True)
        bound = max(memory.host_bytes(name, shape, p) for p in passes)
        assert measured <= bound, (name, dtype, passes, measured, bound)
        assert bound <= 2 * measured + memory._LIBRARIES, (name, dtype, passes, measured, bound)


def test_the_tile_is_that_of_the_tiled_implementation():
    assert memory.TILE == tiled.TILE


@pytest.fixture
def system(monkeypatch, tmp_path):
    """``system(groups, {path: text})`` is a /proc/self/cgroup and files below /sys/fs/cgroup."""

    def make(groups, files, vmstat="oom_kill 7\n"):
        (tmp_path / "cgroup").write_text(groups)
        (tmp_path / "vmstat").write_text(vmstat)
        for path, text in files.items():
            path = tmp_path / "fs" / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(memory, "_ROOT", tmp_path / "fs")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_VMSTAT", tmp_path / "vmstat")
    return make


EVENTS = "low 0\nhigh 0\nmax 3\noom 2\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/a/b\n", {"a/b/memory.events": EVENTS.format(3)}, 3),
        ("0::/\n", {"memory.events": EVENTS.format(4)}, 4),  # a container of version 2
        ("0::/host/x\n", {"memory.events": EVENTS.format(5)}, 5),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.oom_control": CONTROL.format(6)}, 6),
        ("5:memory:/docker/x\n", {"memory/memory.oom_control": CONTROL.format(2)}, 2),
        ("0::/a\n", {}, 7),
        ("", {}, 7),
    ],
)
def test_kills_are_counted_where_the_system_counts_them(system, groups, files, count):
    system(groups, files)
    assert memory.oom_kills() == count


def test_a_system_that_counts_nothing_gives_no_evidence(system, tmp_path):
    system("", {}, vmstat="")
    assert memory.oom_kills() == 0
    assert memory.Watch().reason() == ""
    for path in ("cgroup", "vmstat"):
        (tmp_path / path).unlink()
    assert memory.oom_kills() == 0


@pytest.mark.parametrize("share, said", [(0.09, "1.44 GiB of memory were left"), (0.11, "")])
def test_little_memory_left_at_any_look_is_evidence(system, monkeypatch, share, said):
    system("", {}, vmstat="")
    free = iter((2**34, int(share * 2**34), 2**34))
    monkeypatch.setattr(memory, "_free_on_host", lambda: next(free))
    monkeypatch.setattr(memory, "_free_in_container", lambda: 1 << 62)
    watch = memory.Watch()  # which looks itself
    watch.look()
    watch.look()
    assert watch.reason() == said
