"""Compiled code in the cache is whole or not there, whenever its compiler is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from a2lib import paths
from a2lib.experiments.harness import compiler, process

# Writes the first half of its output, waits where told to, then writes the rest.
FAKE = """#!/bin/sh
for word; do [ "$before" = -o ] && out=$word; before=$word; done
echo "$@" >>"$CALLS"
[ -n "$out" ] || exit 0
printf first >"$out"
[ -z "$SLOW" ] || sleep 600
[ -z "$FAIL" ] || exit 3
printf second >>"$out"
"""


@pytest.fixture
def wrapped(tmp_path, monkeypatch):
    """Start the script in front of a fake g++ with some arguments, in a group of its own."""
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text(FAKE)
    fake.chmod(0o755)
    found = compiler.environment({"CXX": str(fake)}, tmp_path / "cache")
    assert found == compiler.environment({"CXX": str(fake)}, tmp_path / "cache")

    def start(*arguments, **environment):
        given = {**os.environ, "CALLS": str(tmp_path / "calls"), "before": "-o", **environment}
        return subprocess.Popen([found["CXX"], *arguments], env=given, start_new_session=True)

    return start


def test_a_compiler_that_is_killed_leaves_nothing_under_the_name(wrapped, tmp_path):
    out = tmp_path / "x.main.so"
    process = wrapped("a b.cpp", "-o", str(out), SLOW="1")
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("x.main.so*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (left,) = tmp_path.glob("x.main.so*")
    assert left.name == f"x.main.so.{process.pid}.part"
    assert compiler.drop_broken(tmp_path) == [] and not left.exists()
    assert wrapped("a b.cpp", "-o", str(out)).wait() == 0
    assert out.read_text() == "firstsecond"
    assert (tmp_path / "calls").read_text().count("a b.cpp -o ") == 2


def test_a_compiler_that_fails_leaves_nothing_and_its_code(wrapped, tmp_path):
    out = tmp_path / "x.o"
    out.write_text("before")
    assert wrapped("-c", "-o", str(out), FAIL="1").wait() == 3
    assert out.read_text() == "before" and not list(tmp_path.glob("*.part"))


def test_without_an_output_it_is_the_compiler_itself(wrapped, tmp_path):
    assert wrapped("--version").wait() == 0
    assert (tmp_path / "calls").read_text() == "--version\n"


def test_without_a_compiler_or_with_a_space_nothing_is_changed(tmp_path):
    assert compiler.environment({"CXX": "no-such-compiler"}, tmp_path) == {}
    assert compiler.environment({"CXX": "sh"}, tmp_path / "a b") == {}


def test_a_compiler_that_runs_keeps_its_unfinished_file(tmp_path):
    (tmp_path / f"x.so.{os.getpid()}.part").touch()
    assert compiler.drop_broken(tmp_path) == [] and list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["empty", "zeros", "half", "head"])
def test_what_cannot_be_loaded_is_dropped(tmp_path, broken):
    whole = _an_object_file()
    text = {
        "empty": b"",
        "zeros": bytes(5000),
        "half": whole[: len(whole) // 2],
        "head": whole[:40],
    }[broken]
    for name in ("a.main.so", "b.o"):
        (tmp_path / "ab").mkdir(exist_ok=True)
        (tmp_path / "ab" / name).write_bytes(text)
    kept = [tmp_path / "c.so", tmp_path / "d.cpp", tmp_path / "e.so"]
    contents = (whole, b"", b"\xcf\xfa\xed\xfe of another system")
    for path, content in zip(kept, contents, strict=True):
        path.write_bytes(content)
    dropped = compiler.drop_broken(tmp_path)
    assert {path.name for path in dropped} == {"a.main.so", "b.o"}
    assert not any(path.exists() for path in dropped) and all(path.exists() for path in kept)


def test_workers_share_a_cache_and_compile_for_real(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "cache_dir", lambda: tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for name in caches:
        monkeypatch.delenv(name, raising=False)
    given = process.environment()
    assert "TRITON_INTERPRET" not in given
    assert {n: given[n] for n in caches} == {
        n: str(tmp_path / folder) for n, folder in caches.items()
    }
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert process.environment()["TRITON_CACHE_DIR"] == "mine"


def _an_object_file():
    import torch

    with open(torch._C.__file__, "rb") as file:
        return file.read()


LINK = """
import sys
from a2lib.experiments.harness import compiler
compiler.quote_torch()
compiler.quote_torch()
print("torch" in sys.modules)  # what a process does first may be to import it
import torch
assert " " in torch.__file__
print(torch.compile(lambda x: x + 1)(torch.ones(1)).item())
"""


@pytest.mark.slow
def test_torch_in_a_folder_with_a_space_compiles(tmp_path):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "torch").symlink_to(Path(torch.__file__).parent)
    path = os.pathsep.join([str(tmp_path / "a folder"), *sys.path])
    given = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", LINK], env=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "False\n2.0\n"


def test_no_cache_in_a_folder_with_a_space(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.cache_dir() == tmp_path / "build" / "cache"
    monkeypatch.setattr(paths, "ROOT", tmp_path / "a folder")
    assert " " not in str(paths.cache_dir())
