"""Check that imports inside a2lib point one way: `make lint`, or python dev/check_imports.py [SRC].

Five rules, read from the source without importing any of it:

- an import goes to the same part or to a lower floor; parts of the library's floor may use each
  other;
- what other projects take as it is (LIFTED) uses nothing of lab, theory or report;
- inside a part, what serves every section (a room of ROOMS) imports nothing that serves one;
- no two modules import each other, directly or through others, not even inside a function;
- the parts that a reader without a GPU needs reach no torch and no triton when they are imported.

Prints one line for each breach, `file:line: what`, and exits 1 if there is one.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "a2lib"
LIBRARY = 1
FLOORS = {
    "benchmark": 3,
    "leaderboard": 3,
    "report": 3,
    "papermill_default": 3,
    "lab": 2,
    "attention": LIBRARY,
    "model": LIBRARY,
    "optim": LIBRARY,
    "parallel": LIBRARY,
    "theory": LIBRARY,
    "paths": 0,
    "shapes": 0,
    "activations": 0,
    "checks": -1,
    "errors": -1,
    "": 0,  # a2lib/__init__.py
}
# Parts that other projects take as they are, and what these do without.
LIFTED = ("attention", "model", "optim", "parallel")
BOOK = ("lab", "theory", "report")
# Within a part: the modules that serve every section, and those that serve one. The longest prefix
# counts, and what has a name in neither list is on the side of its part's entry.
ROOMS = {
    "a2lib.report": "every",
    "a2lib.report.pages": "one",
    "a2lib.report.readme": "one",
}
TORCH_FREE = ("", "paths", "errors", "checks", "shapes", "activations")
TORCH_FREE += ("papermill_default", "theory", "lab", "report")
HEAVY = ("torch", "triton")
# Modules of such a part that are PyTorch's modes or functions: who imports them has torch.
OF_TORCH = ("a2lib.lab.tape", "a2lib.lab.sanity")


@dataclass(frozen=True)
class Import:
    """One imported name: the module it loads, its line, whether importing the file runs it."""

    module: str
    line: int
    at_import: bool


def module_name(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The part of the library a module belongs to: `a2lib.lab.store` -> `measure`."""
    return (module.split(".") + [""])[1]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(path: Path, module: str, known: set[str]) -> list[Import]:
    """Every import in a file; `from a2lib.x import y` is `a2lib.x.y` where that is a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if is_type_checking(node):
            for child in node.orelse:
                visit(child, at_import)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                found.append(Import(deeper if deeper in known else base, node.lineno, at_import))
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(ast.parse(path.read_text(), str(path)), True)
    return found


def floor_breaches(files: dict[str, Path], graph: dict[str, list[Import]]) -> list[str]:
    lines = []
    for module, path in files.items():
        here = part(module)
        if here not in FLOORS:
            lines.append(f"{path}:1: '{here}' stands on no floor; add it to FLOORS in {__file__}")
            continue
        for one in graph[module]:
            if one.module.split(".")[0] != PACKAGE:
                continue
            there = part(one.module)
            lower = FLOORS.get(there, -1) < FLOORS[here]
            beside = FLOORS.get(there, -1) == FLOORS[here] == LIBRARY
            if not (there == here or lower or beside):
                lines.append(
                    f"{path}:{one.line}: {module} imports {one.module}, which is no lower floor"
                )
    return lines


def lifted_breaches(files: dict[str, Path], graph: dict[str, list[Import]]) -> list[str]:
    return [
        f"{files[module]}:{one.line}: {module}, which is to be lifted out, imports {one.module}"
        for module in files
        if part(module) in LIFTED
        for one in graph[module]
        if one.module.split(".")[0] == PACKAGE and part(one.module) in BOOK
    ]


def serves(module: str) -> str:
    """Return whether a module serves "every" section or "one", or "" if its part has none."""
    names = module.split(".")
    prefixes = (".".join(names[:n]) for n in range(len(names), 0, -1))
    return next((ROOMS[p] for p in prefixes if p in ROOMS), "")


def room_breaches(files: dict[str, Path], graph: dict[str, list[Import]]) -> list[str]:
    return [
        f"{files[module]}:{one.line}: {module}, which serves every section, imports {one.module}"
        for module in files
        if serves(module) == "every"
        for one in graph[module]
        if part(one.module) == part(module) and serves(one.module) == "one"
    ]


def circle_breaches(files: dict[str, Path], graph: dict[str, list[Import]]) -> list[str]:
    lines, done = [], set()

    def walk(module: str, trail: list[str]) -> None:
        if module in trail:
            circle = trail[trail.index(module) :]
            lines.append(f"{files[module]}:1: circle: {' -> '.join([*circle, module])}")
            return
        if module in done:
            return
        for one in graph[module]:
            # A package's own __init__ is loaded by its modules in any case; that is no circle.
            if one.module in graph and one.module != module:
                walk(one.module, [*trail, module])
        done.add(module)

    for module in files:
        walk(module, [])
    return lines


def torch_breaches(files: dict[str, Path], graph: dict[str, list[Import]]) -> list[str]:
    """Chains of imports by which a torch-free part loads torch, shortest first for each module."""
    lines = []
    for start in (m for m in files if part(m) in TORCH_FREE and m not in OF_TORCH):
        queue, seen = [[start]], {start}
        while queue:
            trail = queue.pop(0)
            for one in (one for one in graph[trail[-1]] if one.at_import):
                if one.module.split(".")[0] in HEAVY:
                    chain = " -> ".join([*trail, one.module])
                    lines.append(f"{files[start]}:1: loads torch when imported: {chain}")
                    queue = []
                    break
                names = one.module.split(".")
                for depth in range(1, len(names) + 1):  # a module's packages are loaded with it
                    name = ".".join(names[:depth])
                    if name in graph and name not in seen:
                        seen.add(name)
                        queue.append([*trail, name])
    return lines


RULES = (floor_breaches, lifted_breaches, room_breaches, circle_breaches, torch_breaches)


def breaches(src: Path) -> list[str]:
    """One line for each breach of the rules by the package under `src`."""
    paths = sorted((src / PACKAGE).rglob("*.py"))
    files = {module_name(path, src): path for path in paths}
    known = set(files)
    graph = {module: imports_of(path, module, known) for module, path in files.items()}
    return [line for rule in RULES for line in rule(files, graph)]


def main(args: list[str]) -> int:
    src = Path(args[0]) if args else Path(__file__).resolve().parents[1] / "src"
    if not (src / PACKAGE / "__init__.py").is_file():
        raise SystemExit(f"check_imports: no package {PACKAGE} under {src}")
    found = breaches(src)
    print("\n".join(found) if found else "imports point one way")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
