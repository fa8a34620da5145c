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

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"pytorch": "torch"}


def parsed(lines):
    """Name -> (specifiers, marker) of requirement lines, with conda's names turned into PyPI's."""
    found = {}
    for line in lines:
        need = Requirement(line)
        name = CONDA_NAMES.get(need.name, need.name)
        assert name not in found, f"{name} stands twice"
        found[name] = (need.specifier, need.marker)
    return found


def declared():
    book, dev = (PROJECT["optional-dependencies"][extra] for extra in ("book", "dev"))
    assert dev[0] == "a2lib[book]"
    return parsed([*PROJECT["dependencies"], *book, *dev[1:]])


def pinned():
    lines = (ROOT / "dev" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_environment_yml_is_the_conda_form_of_pyproject():
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    [from_pip] = [entry["pip"] for entry in lines if isinstance(entry, dict)]
    conda = [entry for entry in lines if isinstance(entry, str)]
    conda.remove("pip")
    conda.remove("python" + PROJECT["requires-python"])
    from_pip.remove("--editable .")
    assert parsed([*conda, *from_pip]) == declared()


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
