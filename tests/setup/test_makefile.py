"""What `make` runs, in which order and when it has nothing to do.

Real make in a throw-away repository whose environment holds stand-ins for papermill, Jupyter Book
and Python; each writes what it was called with to `calls`. No notebook and no book is made.
"""

import os
import re
import shutil
import subprocess

import pytest
from programs import write_program

from a2lib.paths import ROOT

# $0 is the stand-in's own name; the last words of its line, its data folder and its input are kept.
RECORD = """#!/bin/sh
echo "$(basename "$0") $* data=${A2LIB_DATA:-unset} in=$(readlink /proc/self/fd/0)" >>calls
"""
STAND_INS = {
    "papermill": RECORD
    + '[ ! -e papermill-fails ] && echo "{}" >"$2" && echo row >build/data/x.csv\n',
    "jupyter-book": RECORD
    + "mkdir -p book/_build/html && echo >book/_build/html/index.html && [ ! -e book-fails ]\n",
    "python": RECORD + "echo '2 passed in 0.10s'\n",
    "ruff": RECORD,
    "jupyter": RECORD,
}


@pytest.fixture
def repository(tmp_path):
    """Return a repository of two notebooks and a book of one page, installed and never built."""
    tmp_path = tmp_path / "it's a2lib #1 [of] 100% mine"
    tmp_path.mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (
        "pyproject.toml _config.yml _toc.yml dev/constraints.txt dev/install.sh book/index.md "
        "data/measured/flash/nvidia-h200.csv notebooks/flash.ipynb notebooks/ddp.ipynb "
        "src/a2lib/__init__.py src/a2lib/report/tables.py src/a2lib/lab/sweep.py"
    ).split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name in ("_config.yml", "_toc.yml", "notebooks"):
        (tmp_path / "book" / name).symlink_to(f"../{name}")
    for name, script in STAND_INS.items():
        write_program(tmp_path / ".venv" / "bin" / name, script)
    write_program(tmp_path / "no-gpu" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    age(tmp_path)
    for stamp in (".a2lib-cpu", ".a2lib-cuda"):
        (tmp_path / ".venv" / stamp).write_text("")
    return tmp_path


def age(repository):
    """Make every file of the repository an hour old, so that what is touched next is newer."""
    for path in repository.rglob("*"):
        if path.is_file() and not path.is_symlink():
            before = path.stat().st_mtime - 3600
            os.utime(path, (before, before))


def make(repository, *args, ends=0, env=None, **streams):
    """Return what make prints, which ends with this exit code."""
    (repository / "calls").unlink(missing_ok=True)
    kept = {"PATH": f"{repository / 'no-gpu'}:{os.environ['PATH']}"}
    for name, value in os.environ.items():
        # The tests may themselves run under make, whose settings would reach the make under test.
        if not name.startswith(("MAKE", "MFLAGS", "A2LIB_DATA", "PATH")):
            kept[name] = value
    env = {**kept, **(env or {})}
    streams = {"capture_output": True, "text": True, **(streams or {"stdin": subprocess.DEVNULL})}
    done = subprocess.run(["make", *args], cwd=repository, env=env, timeout=60, **streams)
    assert done.returncode == ends, done.stderr
    return done


def calls(repository):
    """Return what the stand-ins were called with, in order, one line each."""
    path = repository / "calls"
    return path.read_text().splitlines() if path.exists() else []


def programs(repository):
    return [line.split()[0] for line in calls(repository)]


def test_book_measures_into_build_data_and_builds_without_it(repository):
    done = make(repository, "book", env={"A2LIB_DATA": "/elsewhere"})
    own = repository / "build" / "data"
    assert calls(repository) == [
        f"papermill notebooks/ddp.ipynb build/runs/ddp.ipynb data={own} in=/dev/null",
        f"papermill notebooks/flash.ipynb build/runs/flash.ipynb data={own} in=/dev/null",
        "python -m a2lib.report.readme data=/elsewhere in=/dev/null",
        "jupyter-book build book/ -W -n --keep-going data=unset in=/dev/null",
    ]
    index = repository / "book" / "_build" / "html" / "index.html"
    assert done.stdout.splitlines()[-1] == f"The book: {index}"


def test_a_book_is_built_again_by_what_changed_and_by_nothing_else(repository):
    first = make(repository, "book")
    second = make(repository, "book")
    assert calls(repository) == []
    assert second.stdout == first.stdout.splitlines()[-1] + "\n"
    for changed, expected in (
        ("book/index.md", ["python", "jupyter-book"]),
        ("src/a2lib/report/tables.py", ["python", "jupyter-book"]),
        ("src/a2lib/lab/sweep.py", ["papermill", "papermill", "python", "jupyter-book"]),
        ("notebooks/ddp.ipynb", ["papermill", "python", "jupyter-book"]),
    ):
        age(repository)
        (repository / changed).write_text("changed")
        make(repository, "book")
        assert programs(repository) == expected
    (repository / "data/measured/flash/nvidia-h200.csv").unlink()
    make(repository, "book")
    assert programs(repository) == ["python", "jupyter-book"]


@pytest.mark.parametrize("broken", ["papermill-fails", "book-fails"])
def test_what_failed_is_not_taken_as_done(repository, broken):
    (repository / broken).write_text("")
    make(repository, "book", ends=2)
    (repository / broken).unlink()
    make(repository, "book")
    assert programs(repository)[-1] == "jupyter-book"


def test_parameters_of_a_notebook_are_handed_on(repository):
    make(repository, "flash", "SEQ_LEN=65536", "HEAD_DIM=[64,128]", "A2LIB_DATA=here")
    [call] = calls(repository)
    assert call.startswith("python dev/run_notebook.py flash ")
    assert sorted(call.split()[3:5]) == ["HEAD_DIM=[64,128]", "SEQ_LEN=65536"]
    assert "A2LIB_DATA=" not in call and " data=here " in call
    make(repository, "lab", "A2LIB_DATA=x y")
    assert f"data={repository}/x y " in calls(repository)[0]


def test_clean_and_distclean_keep_what_was_measured(repository):
    make(repository, "book")
    cached = repository / "build" / "cache" / "inductor"
    cached.mkdir(parents=True)
    for target in ("clean", "distclean"):
        make(repository, target)
        assert not cached.exists()
        assert (repository / "build" / "data" / "x.csv").exists()
        assert not (repository / "book" / "_build").exists()
    assert not (repository / ".venv").exists()


def test_every_make_command_in_the_documents_is_a_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^TARGETS := (.*)$", text, re.MULTILINE)[1].split())
    targets |= {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(r"(?:^|`|&& )make ([a-z_]+)", (ROOT / name).read_text(), re.MULTILINE)
        assert named, name
        assert set(named) <= targets, name
