"""Write dev/constraints.txt: exact versions of all that `pip install -e '.[dev]'` needs here.

    make pins        after changing a range in pyproject.toml and installing

A local label (`2.13.0+cpu`) is dropped: which build of torch is installed is decided by
dev/install.sh, not by the pin. What pip builds with belongs to the environment and is left out.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

OLDEST_PYTHON = "3.11.0"  # a pin must hold for every Python that pyproject.toml admits
UNPINNED = {"a2lib", "pip", "setuptools", "wheel"}
OF_THE_BUILD = ("torch", "triton")  # not the same with and without a GPU
HEADER = """\
# Exact versions of everything that `make` installs. Written by `make pins`.
# Without a GPU also these, of the CPU build; with one, and under conda, torch brings its triton:
"""


def reachable(root: str, extra: str) -> dict[str, str]:
    """Name and version of each installed distribution that `root[extra]` needs, itself included."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(root, extra), (root, "")]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            dist = distribution(name)
        except PackageNotFoundError:  # of another platform, or an extra nobody asked for
            continue
        needs = SpecifierSet(dist.metadata.get("Requires-Python") or "")
        if OLDEST_PYTHON not in needs:
            raise SystemExit(f"pins: {name} {dist.version} needs Python {needs}: take an older")
        versions[name] = dist.version.split("+")[0]
        for line in dist.requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                child = canonicalize_name(need.name)
                todo += [(child, one) for one in {"", *need.extras}]
    return versions


def main() -> None:
    pins = reachable("a2lib", "dev")
    lines = [f"# {name}=={pins[name]}\n" for name in OF_THE_BUILD]
    others = pins.keys() - UNPINNED - {*OF_THE_BUILD}
    lines += [f"{name}=={pins[name]}\n" for name in sorted(others)]
    target = Path(__file__).with_name("constraints.txt")
    target.write_text(HEADER + "".join(lines))
    print(f"{len(lines)} pins in dev/{target.name}")


if __name__ == "__main__":
    main()
