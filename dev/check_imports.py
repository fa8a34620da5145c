"""Check that imports inside a2lib point one way: `make lint`, or python dev/check_imports.py [SRC].

A module may import its own part and the parts that MAY_IMPORT names for it, and no two modules may
import each other, directly or through others, not even inside a function. So what other projects
take as it is (attention, model, optim, parallel) uses nothing of lab, theory or report, and what
serves every page of the book (report) nothing that serves one. The source is read, and not
imported: what loads no torch is told by tests/setup/test_imports.py.

Prints one line for each breach, and exits 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "a2lib"
ROOT = ""  # a2lib/__init__.py
BASE = {ROOT, "errors", "checks", "owners", "paths", "shapes", "activations"}
LIBRARY = BASE | {"attention", "model", "optim", "parallel"}
MEASURED = LIBRARY | {"theory", "lab"}
PAGES = "one page's"
# A part that is not here may import the base.
MAY_IMPORT = dict.fromkeys(BASE, BASE) | {
    "attention": LIBRARY,
    "model": LIBRARY,
    "optim": LIBRARY,
    "parallel": LIBRARY,
    "theory": LIBRARY,
    "lab": LIBRARY | {"theory"},
    "report": MEASURED,
    PAGES: MEASURED | {"report"},
    "benchmark": MEASURED,
    "leaderboard": MEASURED,
    "papermill_default": MEASURED,
}
OF_ONE_PAGE = ("a2lib.report.pages", "a2lib.report.readme")


def part_of(module: str) -> str:
    """Return the part that a module belongs to: lab for a2lib.lab.store."""
    if module.startswith(OF_ONE_PAGE):
        return PAGES
    return [*module.split("."), ROOT][1]


def module_name(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports_of(node: ast.AST, modules: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the modules of the package that a tree imports, each with its line, but for those that
    a type checker alone sees; `from a2lib.x import y` is a2lib.x.y where that is a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                deeper = f"{child.module}.{alias.name}"
                names.append(deeper if deeper in modules else child.module)
        for name in names:
            if name in modules:
                yield name, child.lineno
        yield from imports_of(child, modules)


def breaches(src: Path) -> list[str]:
    """Return one line for each breach by the package under `src`."""
    files = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        files[module_name(path, src)] = path
    lines, graph = [], {}
    for module, path in files.items():
        here = part_of(module)
        graph[module] = set()
        for imported, line in imports_of(ast.parse(path.read_text(), str(path)), set(files)):
            there = part_of(imported)
            if there != here and there not in MAY_IMPORT.get(here, BASE):
                lines.append(f"{path}:{line}: {module} imports {imported}")
            if imported != module:
                graph[module].add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        lines.append(f"{src}: circle: {' -> '.join(error.args[1])}")
    return lines


def main(args: list[str]) -> int:
    src = Path(args[0]) if args else Path(__file__).resolve().parents[1] / "src"
    if not (src / PACKAGE / "__init__.py").is_file():
        raise SystemExit(f"check_imports: no package {PACKAGE} under {src}")
    found = breaches(src)
    print("\n".join(found) if found else "imports point one way")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
