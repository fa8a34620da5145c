"""The places that name dependencies say the same, and CITATION.cff agrees with the package."""

import re
import tomllib
from importlib.metadata import distribution

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import a2lib
from a2lib.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]


def parsed(lines):
    """Name -> (specifiers, marker) of requirement lines."""
    found = {}
    for line in lines:
        need = Requirement(line)
        assert need.name not in found, f"{need.name} stands twice"
        found[need.name] = (need.specifier, need.marker)
    return found


def declared():
    book, dev = (PROJECT["optional-dependencies"][extra] for extra in ("book", "dev"))
    assert dev[0] == "a2lib[book]"
    return parsed([*PROJECT["dependencies"], *book, *dev[1:]])


def constraints():
    return (ROOT / "dev" / "constraints.txt").read_text().splitlines()


def pinned():
    """Name -> version, those of the CPU build as well."""
    lines = [line.removeprefix("# ") for line in constraints()]
    return dict(line.split("==") for line in lines if "==" in line)


def test_conda_has_the_pins_and_a_torch_of_its_own():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    [from_pip] = [entry["pip"] for entry in lines if isinstance(entry, dict)]
    assert from_pip == ["--constraint dev/constraints.txt", "--editable .[dev]"]
    conda = [entry for entry in lines if isinstance(entry, str)]
    torch = f"pytorch{declared()['torch'][0]}"
    python = f"python{PROJECT['requires-python']}"
    # PyTorch brings numpy: in the version of the pins, or pip would put another over it.
    assert set(conda) == {python, "pip", torch, f"numpy={pinned()['numpy']}"}
    names = {line.split("==")[0] for line in constraints()}
    assert names.isdisjoint({"torch", "triton"}) and {"# torch", "# triton"} <= names


def test_a_wheel_takes_every_file_that_the_package_reads():
    parts = SETUPTOOLS["package-data"].items()
    taken = {f"{part.replace('.', '/')}/{name}" for part, names in parts for name in names}
    package = ROOT / "src" / "a2lib"
    files = [path for path in package.rglob("*") if path.is_file()]
    read = [path for path in files if path.suffix not in (".py", ".pyc", ".md")]
    assert taken == {str(path.relative_to(package.parent)) for path in read}


@pytest.mark.parametrize("name", sorted(declared()))
def test_every_dependency_is_pinned_inside_its_range(name):
    specifier, _ = declared()[name]
    assert pinned()[name] in specifier


def test_no_pin_shuts_out_a_python_that_pyproject_admits():
    oldest = re.fullmatch(r">=(\d+\.\d+)", PROJECT["requires-python"])[1] + ".0"
    shut_out = []
    for name, version in pinned().items():
        try:
            metadata = distribution(name).metadata
        except ModuleNotFoundError:
            continue
        if metadata["Version"].split("+")[0] == version:
            needs = SpecifierSet(metadata.get("Requires-Python") or "")
            if oldest not in needs:
                shut_out.append(f"{name}=={version} needs Python {needs}")
    assert not shut_out


def test_triton_is_asked_for_on_linux_alone():
    marker = declared()["triton"][1]
    assert marker == Marker("sys_platform == 'linux'")


def test_pre_commit_runs_the_pinned_ruff():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [ruff] = [entry for entry in config["repos"] if entry["repo"].endswith("/ruff-pre-commit")]
    assert ruff["rev"] == f"v{pinned()['ruff']}"


def test_citation_parses_and_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["authors"]
    assert citation["version"] == a2lib.__version__
    assert citation["license"] == PROJECT["license"]
    # None until the repository has one: an address that was made up once stood in four places.
    assert citation.get("repository-code") == PROJECT.get("urls", {}).get("Repository")
    assert (ROOT / "LICENSE").read_text().startswith(f"{PROJECT['license']} License")


def test_the_changelog_and_the_books_citation_name_this_version():
    assert f"\n## {a2lib.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"{{Version {a2lib.__version__}}}" in (ROOT / "book" / "references.md").read_text()
