import ast
import importlib.util
import re
from pathlib import Path

import pytest

from a2lib.paths import ROOT

CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.M | re.S)
# Front matter of a cell, or its options line by line.
OPTIONS = re.compile(r"\A(---\n[\s\S]*?^---\n|(:\w.*\n)+)", re.M)


@pytest.fixture
def shown_by(monkeypatch):
    """``shown_by(page, data)``: what each cell of a page shows with that data folder."""

    def run(page, data):
        monkeypatch.setenv("A2LIB_DATA", str(data))
        monkeypatch.chdir(ROOT / "book")
        names, shown = {}, []
        for cell in CELL.findall((ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")):
            *before, last = ast.parse(OPTIONS.sub("", cell)).body
            exec(compile(ast.Module(before, []), page, "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(str(eval(compile(ast.Expression(last.value), page, "eval"), names)))
            else:
                exec(compile(ast.Module([last], []), page, "exec"), names)
        return shown

    return run


@pytest.fixture(scope="session")
def synthetic():
    """The module that writes invented rows in the shape of a sweep."""
    return _module("synthetic")


def _module(name):
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"a2lib_tests_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def complete(synthetic, tmp_path_factory):
    """A data folder with a complete synthetic sweep of the published device."""
    return synthetic.write(tmp_path_factory.mktemp("complete"))
