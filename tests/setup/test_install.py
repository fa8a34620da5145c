"""Which torch dev/install.sh asks pip for, with a stand-in for the environment's Python and pip."""

import os
import re
import shutil
import subprocess

import pytest
from programs import write_program

from a2lib.paths import ROOT

CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
# Answers the questions of install.sh; `pip install` notes its line and the torch it would bring.
PYTHON = """#!/bin/sh
case "$*" in
    *"import pip"*) exit 0 ;;
    *version_info*) exit 0 ;;
    *'version("torch")'*) cat torch-here 2>/dev/null || exit 1 ;;
    *"config list"*) cat pip-config ;;
    *" uninstall "*) echo "uninstall" >>calls; rm -f torch-here ;;
    *" install "*)
        echo "$*" | sed 's/.* install //; s/--no-compile --progress-bar off //' >>calls
        [ ! -e pip-fails ] || { seq 100; echo "ERROR: no space left on device"; exit 1; }
        case "$*" in
            *download.pytorch.org* | *" -e "*) ;;
            *+cpu*) [ ! -e no-cpu-build ] || exit 1 ;;
        esac
        case "$*" in *+cpu*) echo 2.13.0+cpu >torch-here ;; *) echo 2.14.0 >torch-here ;; esac ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
    tmp_path = tmp_path / "a2lib of mine"
    for name in ("install.sh", "constraints.txt"):
        (tmp_path / "dev").mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / "dev" / name, tmp_path / "dev")
    write_program(tmp_path / ".venv" / "bin" / "python", PYTHON)
    write_program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    write_program(tmp_path / "bin" / "uname", "#!/bin/sh\necho Linux\n")
    (tmp_path / "pip-config").write_text("global.timeout='60'\n")
    return tmp_path


def install(repository, **settings):
    env = {**os.environ, "PATH": f"{repository / 'bin'}:{os.environ['PATH']}"}
    for name in ("PYTHON", "TORCH", "PINS"):
        env.pop(name, None)
    env |= settings
    streams = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(["dev/install.sh"], cwd=repository, env=env, timeout=60, **streams)


def asked(repository, **env):
    """The lines with which pip was called; the installation succeeds."""
    done = install(repository, **env)
    assert done.returncode == 0, done.stderr
    return (repository / "calls").read_text().splitlines()


def pins(repository):
    return (repository / ".venv" / "a2lib-constraints.txt").read_text()


def test_without_a_gpu_it_is_the_cpu_build_from_its_index(repository):
    assert asked(repository) == [
        f"-c .venv/a2lib-constraints.txt {CPU_INDEX} torch==2.13.0+cpu",
        "-c .venv/a2lib-constraints.txt -e .[dev] torch==2.13.0+cpu",
    ]
    text = (ROOT / "dev" / "constraints.txt").read_text()
    assert pins(repository) == f"{text}triton==3.6.0\n" and "\n# triton==3.6.0\n" in text


def test_a_source_of_ones_own_comes_first_and_is_no_dead_end(repository):
    (repository / "pip-config").write_text("global.index-url='https://mirror'\n")
    assert asked(repository)[0] == "-c .venv/a2lib-constraints.txt torch==2.13.0+cpu"
    (repository / "no-cpu-build").touch()
    (repository / "calls").unlink()
    (repository / "torch-here").unlink()
    own, index, _ = asked(repository)
    assert CPU_INDEX not in own and CPU_INDEX in index


def test_on_a_mac_there_is_one_build(repository):
    write_program(repository / "bin" / "uname", "#!/bin/sh\necho Darwin\n")
    assert asked(repository)[0].split()[-1] == "torch==2.13.0"
    assert "\ntriton==" not in pins(repository)


def test_with_a_gpu_it_is_the_cuda_build_and_the_triton_that_it_brings(repository):
    asked(repository)
    (repository / "calls").unlink()
    write_program(repository / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    assert asked(repository) == [
        "uninstall",  # the CPU build, which was there
        "-c .venv/a2lib-constraints.txt torch>=2.11",
        "-c .venv/a2lib-constraints.txt -e .[dev] torch==2.14.0",
    ]
    text = "\n" + pins(repository)
    assert "\npapermill==" in text and "\ntorch==" not in text and "\ntriton==" not in text


def test_a_cuda_build_stays_where_no_gpu_is_seen(repository):
    """An environment on a file system shared by machines with and without a GPU."""
    (repository / "torch-here").write_text("2.14.0\n")
    assert "uninstall" not in asked(repository)
    assert (repository / "torch-here").read_text() == "2.14.0\n"


def test_each_step_is_a_line_and_pip_is_in_the_log(repository):
    done = install(repository)
    lines = done.stderr.splitlines()
    assert done.stdout == "" and len(lines) < 8
    for line in lines:
        assert line.startswith("install: ")
    assert "torch==2.13.0+cpu" in lines[0]
    assert re.fullmatch(r"install: done in \d+ s: torch 2.13.0\+cpu in .venv", lines[-1])


def test_what_fails_shows_the_end_of_its_reason(repository):
    (repository / "pip-fails").touch()
    done = install(repository)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-2] == "ERROR: no space left on device" and "1" not in lines
    assert lines[-1].endswith("are the end of build/install.log")
    assert "no torch==2.13.0+cpu in pip's sources nor at https://" in lines[-1]


def test_another_torch_and_no_pins_can_be_asked_for(repository):
    lines = asked(repository, TORCH="torch==2.11.0", PINS="")
    assert lines[0].endswith(f"{CPU_INDEX} torch==2.11.0")
    assert pins(repository) == ""


def test_an_environment_copied_from_elsewhere_is_made_anew(repository):
    asked(repository)
    where = repository / ".venv" / ".a2lib-where"
    assert where.read_text() == f"{repository}\n"
    where.write_text("/somewhere/else\n")
    write_program(repository / "bin" / "old-python", "#!/bin/sh\nexit 1\n")
    done = install(repository, PYTHON="old-python")  # stops it before it makes a real one
    assert done.stderr.startswith("install: .venv is a copy of one made in another folder")
    assert not (repository / ".venv").exists()


def test_a_python_that_is_too_old_or_missing_is_one_line(repository):
    shutil.rmtree(repository / ".venv")
    old = '#!/bin/sh\ncase "$*" in *version_info*) exit 1 ;; *) echo 3.9.2 ;; esac\n'
    write_program(repository / "bin" / "old-python", old)
    for python, words in (
        ("old-python", "install: a2lib needs Python 3.11 or newer, 'old-python' is 3.9.2"),
        ("no-such-python", "install: no 'no-such-python' here; install Python 3.11"),
    ):
        done = install(repository, PYTHON=python)
        assert done.returncode == 1 and done.stderr.startswith(words)
        assert done.stderr.count("\n") == 1
        assert not (repository / ".venv").exists()
