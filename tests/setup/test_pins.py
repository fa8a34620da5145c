"""The places that name dependencies say the same, and CITATION.cff agrees with the package."""

import re
import tomllib

import yaml
from packaging.requirements import Requirement

import a2lib
from a2lib.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
CONSTRAINTS = ROOT / "dev" / "constraints.txt"


def declared():
    """Return the requirements of pyproject.toml by name."""
    extras = PROJECT["optional-dependencies"]
    book, dev = extras["book"], extras["dev"]
    assert dev[0] == "a2lib[book]"
    needs = {}
    for line in [*PROJECT["dependencies"], *book, *dev[1:]]:
        need = Requirement(line)
        assert need.name not in needs, f"{need.name} stands twice"
        needs[need.name] = need
    return needs


def pinned():
    """Name -> version, those of the CPU build as well."""
    return dict(re.findall(r"^(?:# )?([\w.-]+)==(\S+)", CONSTRAINTS.read_text(), re.M))


def test_conda_has_the_pins_and_a_torch_of_its_own():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    *conda, from_pip = lines
    assert from_pip == {"pip": ["--constraint dev/constraints.txt", "--editable .[dev]"]}
    torch = f"pytorch{declared()['torch'].specifier}"
    python = f"python{PROJECT['requires-python']}"
    # PyTorch brings numpy: in the version of the pins, or pip would put another over it.
    assert set(conda) == {python, "pip", torch, f"numpy={pinned()['numpy']}"}
    text = "\n" + CONSTRAINTS.read_text()
    for name in ("torch", "triton"):
        assert f"\n# {name}==" in text and f"\n{name}==" not in text


def test_a_wheel_takes_every_file_that_the_package_reads():
    source = ROOT / "src"
    taken, read = set(), set()
    for part, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            taken.add(source / part.replace(".", "/") / pattern)
    for path in (source / "a2lib").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md"):
            read.add(path)
    assert taken == read


def test_every_dependency_is_pinned_inside_its_range():
    pins = pinned()
    for name, need in declared().items():
        assert pins[name] in need.specifier, name


def test_pre_commit_runs_the_pinned_ruff():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    revisions = {entry["repo"].rpartition("/")[2]: entry.get("rev") for entry in config["repos"]}
    assert revisions["ruff-pre-commit"] == f"v{pinned()['ruff']}"


def test_the_changelog_and_the_books_citation_name_this_version():
    assert f"\n## {a2lib.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"{{Version {a2lib.__version__}}}" in (ROOT / "book" / "references.md").read_text()
