"""The notebook in lab/README.md is a whole one: its cells run, and what a reader adds is a row."""

import re
from operator import methodcaller

from a2lib.paths import ROOT


def test_the_notebook_of_the_readme_runs_with_an_entry_of_the_readers(
    tmp_path, monkeypatch, forked_workers
):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    text = (ROOT / "src" / "a2lib" / "lab" / "README.md").read_text(encoding="utf-8")
    parameters, *cells = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    cells[1] = cells[1].replace(
        "\nasked", '\nMAKE["mine"] = lambda numbers: sorted(numbers)\nasked'
    )
    namespace = {}
    exec(parameters.replace('"auto"', '"16,32"'), namespace)
    for cell in cells:
        exec(cell, namespace)
    frame = namespace["frame"]
    assert list(frame["sort"]) == ["builtin", "torch", "mine"] * 2
    assert set(frame["status"]) == {"ok"} and (frame["ns_an_element"] > 0).all()


def test_the_figure_of_the_readme_has_each_size_once():
    text = (ROOT / "src" / "a2lib" / "lab" / "README.md").read_text(encoding="utf-8")
    (cell,) = re.findall(r"```\{code-cell\} ipython3\n---\n.*?\n---\n(.*?)```", text, re.DOTALL)
    *lines, last = cell.strip().splitlines()
    namespace = {}
    exec("\n".join(lines), namespace)
    axes = eval(last, namespace)
    written = methodcaller("get_text")
    labels = list(map(written, axes.get_xticklabels()))
    assert "128" in labels and len(labels) == len(set(labels))
    devices = set(map(written, axes.get_legend().get_texts()))
    assert {"nvidia-h100-80gb-hbm3", "nvidia-h200"} <= devices
