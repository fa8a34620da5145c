"""A notebook that is opened where the package is not installed says what to install."""

import builtins

import nbformat
import pytest

from a2lib.paths import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_the_first_import_says_what_to_install(path, monkeypatch):
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    first = next(c.source for c in cells if "import" in c.source)
    real_import = builtins.__import__

    def without_a2lib(name, *arguments, **options):
        if name.split(".")[0] == "a2lib":
            raise ModuleNotFoundError("No module named 'a2lib'")
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_a2lib)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[book\]'.*clone"):
        exec(first, {})
