"""Imports point one way, and what a reader without a GPU needs brings no torch."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from a2lib.paths import ROOT

CHECK = [sys.executable, str(ROOT / "dev" / "check_imports.py")]


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def package(tmp_path):
    """Writes modules of a throw-away a2lib, `{"lab/store.py": source}`, and checks it."""

    def check(files):
        for name, source in {"__init__.py": "", **files}.items():
            path = tmp_path / "a2lib" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return run(*CHECK, str(tmp_path))

    return check


def test_the_library_itself():
    done = run(*CHECK)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("files", "complaint"), [
    ({"theory/a.py": "from a2lib import lab", "lab/__init__.py": ""},
     "a2lib.theory.a imports a2lib.lab"),
    ({"parallel/a.py": "from a2lib.theory import b", "theory/b.py": ""},
     "a2lib.parallel.a imports a2lib.theory.b"),
    ({"report/a.py": "import a2lib.report.pages.b", "report/pages/b.py": ""},
     "a2lib.report.a imports a2lib.report.pages.b"),
    ({"lab/a.py": "import a2lib.lab.b", "lab/b.py": "def f():\n    import a2lib.lab.a"}, "circle"),
])  # fmt: skip
def test_a_breach_is_named(package, files, complaint):
    done = package(files)
    assert done.returncode == 1
    assert complaint in done.stdout


WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules.update(torch=None, triton=None)
for part in ("papermill_default", "theory", "lab", "report"):
    package = importlib.import_module("a2lib." + part)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if module.name not in ("a2lib.lab.tape", "a2lib.lab.sanity"):  # PyTorch's modes, functions
            importlib.import_module(module.name)
"""


def test_what_the_book_is_built_with_needs_no_torch():
    done = run(sys.executable, "-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr


WITHOUT = "import sys; sys.modules.update(dict.fromkeys({names}))\n"
LIBRARY = "attention benchmark leaderboard lab model optim parallel theory".split()
IMPORT_ALL = f"""
import importlib, pkgutil, sys
for part in {LIBRARY}:
    package = importlib.import_module("a2lib." + part)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(module.name)
"""


@pytest.fixture
def without_the_book():
    """Runs a program where no package of the extra `book` can be imported."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    book = {Requirement(line).name for line in extras["optional-dependencies"]["book"]}
    names = []
    for name, packages in packages_distributions().items():
        if book & set(map(canonicalize_name, packages)):
            names.append(name)
    assert {"pandas", "matplotlib", "papermill"} <= set(names)
    head = WITHOUT.format(names=names)
    return lambda program: run(sys.executable, "-c", head + program)


@pytest.mark.slow
@pytest.mark.triton
def test_the_library_needs_no_package_of_the_book(without_the_book):
    done = without_the_book(IMPORT_ALL)
    assert done.returncode == 0, done.stderr


def test_the_report_names_the_extra_that_it_needs(without_the_book):
    done = without_the_book("import a2lib.report")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: a2lib.report needs ")
    assert last.endswith("pip install -e '.[book]'")


TRAIN = """
import torch
import torch.distributed as dist
from a2lib import attention, lab, model, optim, parallel
for part in (attention, lab, model, optim, parallel):
    for name in part.__all__:
        getattr(part, name)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for wrap in (parallel.DDP, parallel.FSDP):
    wrapped = wrap(model.TransformerLM(64, 16, 32, 2, 2, 64))
    trained = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(trained)
    if wrap is parallel.DDP:
        optimizer = parallel.ShardedOptimizer(trained, torch.optim.AdamW)
    tokens = torch.randint(0, 64, (2, 16))
    model.cross_entropy(wrapped(tokens), tokens).backward()
    wrapped.finish_gradient_synchronization()
    optimizer.step()
print("trained")
"""


@pytest.mark.slow
def test_all_of_it_works_without_triton_which_macos_has_not():
    done = run(sys.executable, "-c", WITHOUT.format(names=["triton"]) + TRAIN)
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr
