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


@pytest.fixture(scope="session")
def strips():
    """The module that makes strips of traces of data parallelism by hand."""
    return _module("ddp_strips")


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


@pytest.fixture(scope="session")
def partial(synthetic, tmp_path_factory):
    """A data folder of two implementations, bf16, up to 8,192 tokens, and no ceiling."""

    def keep(shape):
        implementation, dtype, batch, heads, seq_len, *_ = shape
        return (implementation in ("eager", "a2lib") and dtype == "bf16" and seq_len <= 8192
                and batch == heads == 1)  # fmt: skip

    return synthetic.write(tmp_path_factory.mktemp("partial"), keep=keep, ceiling=False)


@pytest.fixture
def made(synthetic, tmp_path):
    """A Flash of rows made by hand: made(flash=[...], ceiling=[...], device=...)."""
    from a2lib.report.chapters.flash import Flash

    def make(device="nvidia-h200", **sections):
        return Flash([synthetic.by_hand(tmp_path, device=device, **sections)])

    return make


@pytest.fixture(scope="session")
def timed():
    """A row of the leaderboard's shape, or of another; p20 and p80 are the median unless given."""

    def row(implementation, pass_, ms, low=None, high=None, **over):
        shape = {"dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 16384, "head_dim": 64}
        return {"implementation": implementation, **shape, "causal": "true", "pass": pass_,
                "ms": ms, "ms_p20": low or ms, "ms_p80": high or ms, "n": 9, **over}  # fmt: skip

    return row


@pytest.fixture(scope="session")
def one_head(timed):
    """A row of the handout's sweep: one head, 65,536 tokens unless given."""

    def row(implementation, pass_, ms, low=None, high=None, **over):
        over = {"heads": 1, "seq_len": 65536, **over}
        return timed(implementation, pass_, ms, low, high, **over)

    return row


@pytest.fixture
def bench(synthetic, tmp_path):
    """``bench(section=rows, ...)``: the benchmark's chapter on rows made by hand."""
    from a2lib.report.chapters.benchmark import Benchmark

    def make(**sections):
        return Benchmark([synthetic.by_hand(tmp_path, **sections)])

    return make
