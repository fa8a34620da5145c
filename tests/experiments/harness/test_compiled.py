"""Where workers keep compiled code, and that none which may be half written is loaded."""

import contextlib
import fcntl
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from programs import printed

from a2lib import paths
from a2lib.experiments.harness import process
from a2lib.experiments.harness.worker import AT_WORK, at_work

START = "experiments.harness.toy:start"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Inductor's, with something compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    compiled(tmp_path / "inductor")
    return tmp_path / "inductor"


def compiled(cache):
    for name in ("x.main.so", "x.o", "x.h.gch", "x.cpp"):
        (cache / "ab").mkdir(exist_ok=True, parents=True)
        (cache / "ab" / name).touch()


def left(cache):
    return {path.name for path in (cache / "ab").iterdir()}


def test_after_a_worker_that_is_killed_at_work_all_is_compiled_again(cache):
    task = {"do": START, "spec": {"seconds": 9}, "device": "cpu", "seed": 0}
    with contextlib.closing(process.Worker(START)) as worker:
        events = worker.ask(task, 60)
        assert "pid" in next(events)
        (mark,) = cache.glob(f"{AT_WORK}*")
        with at_work():  # beside one that is still there
            assert len(left(cache)) == 4
    with at_work():
        assert left(cache) == {"x.cpp"} and not mark.exists()
        compiled(cache)
    assert not list(cache.glob("*a2lib*"))
    with at_work():
        assert len(left(cache)) == 4


def test_on_a_file_system_without_locks_nothing_is_dropped(cache, monkeypatch):
    (cache / f"{AT_WORK}1").touch()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks")))
    with at_work():
        assert len(left(cache)) == 4


def test_workers_share_a_cache_and_compile_for_real(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "cache_dir", lambda: tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    given = process.environment()
    assert given["TRITON_INTERPRET"] == "0"
    assert {n: given[n] for n in CACHES} == {n: f"{tmp_path}/{at}" for n, at in CACHES.items()}
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert process.environment()["TRITON_CACHE_DIR"] == "mine"


LINK = """
import shlex
import torch
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
from a2lib.paths import quote_torch
assert " " in torch.__file__
quote_torch()
quote_torch()
line = CppBuilder("x", ["x.cpp"], CppTorchOptions()).get_command_line()
print(*(word for word in shlex.split(line) if "torch" in word), sep="\\n")
"""


def test_torch_in_a_folder_with_a_space_is_one_word_of_its_command(tmp_path, monkeypatch, python):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "a folder"))
    words = printed(python(LINK), 300).splitlines()
    assert f"-L{tmp_path}/a folder/torch/lib" in words
    assert not [word for word in words if word.startswith("folder/")]


def test_no_cache_in_a_folder_with_a_space(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.cache_dir() == tmp_path / "build" / "cache"
    monkeypatch.setattr(paths, "ROOT", tmp_path / "a folder")
    monkeypatch.setattr("os.getuid", lambda: 54321)  # a container's, of no user
    assert " " not in str(paths.cache_dir()) and paths.cache_dir().name == "a2lib-54321"
