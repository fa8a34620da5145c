"""A row that is stored by other code than there is now is told from the others, in one line."""

import linecache
import sys

import cloudpickle
import pytest

from a2lib.lab import Table, read_runs, sweep
from a2lib.lab.notebook import Run
from a2lib.lab.runs import runs_table
from a2lib.lab.sources import sources

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CELLS = """
import math
from dataclasses import dataclass


@dataclass
class Size:
    tokens: int

    def whole(self):
        return self.tokens


def scaled(x):
    return x * FACTOR


class Mine:
    @staticmethod
    def forward(x):
        return scaled(x)

    @classmethod
    def apply(cls, x):
        return cls.forward(x)

    @property
    def double(self):
        return 2 * self.forward(1)


def plain(x):
    return x


def times(factor):
    return lambda x: x * factor


FACTOR = 3
x = 1
MAKE = {
    "plain": plain,
    "library": math.sqrt,
    "lambda": lambda x: (
        x + 1
    ),
    "class": Mine.apply,
    "record": Size(64),
    "made": times(3),
}


def duration(x):
    return float(x)


def measure(keys):
    for key in keys:
        ms = duration(MAKE[key["part"]](key["size"]))
        yield {**key, "ms": ms, "ms_p20": ms, "ms_p80": ms, "n": 1}


def figure():
    return 1
"""
PARTS = ("plain", "library", "lambda", "class")


def cells(old="", new=""):
    """Return what the cells of a notebook define, a piece of them changed."""
    assert old in CELLS
    text = CELLS.replace(old, new, 1)
    name = f"<cell {abs(hash(text))}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    namespace = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    return namespace


def changed(*pieces):
    before, after = sources(cells()["measure"]), sources(cells(*pieces)["measure"])
    assert before.keys() == after.keys() == {"measure", *PARTS, "record", "made"}
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    "pieces, names",
    [
        (("return x\n", "return +x\n"), {"plain"}),
        (("x + 1", "x + 2"), {"lambda"}),
        (("cls.forward(x)", "cls.forward(+x)"), {"class"}),
        (("2 * self", "4 * self"), {"class"}),
        (("return x * FACTOR", "return FACTOR * x"), {"class"}),
        (("Size(64)", "Size(65)"), {"record"}),
        (("float(x)", "1.0 * x"), {"measure"}),
        (('"n": 1', '"n": 2'), {"measure"}),
        (("return 1\n", "return 2\n"), set()),
        (("FACTOR = 3", "FACTOR = 4"), {"class"}),
        (("x = 1", "x = 2"), set()),
        (("times(3)", "times(4)"), {"made"}),
        (("math.sqrt", "math.exp"), {"library"}),
        (("math.sqrt", "plain"), {"library"}),
    ],
)
def test_a_change_is_told_by_the_name_of_what_uses_it(pieces, names):
    assert changed(*pieces) == names


@pytest.fixture
def measured(tmp_path, forked_workers, capsys):
    """Measure every part by the cells, changed or not, and return what the sweep says first."""

    def run(*pieces, remeasure=False):
        table = Table("toy", "cpu", tmp_path / "data", key="part size")
        task = [{"part": part, "size": 4} for part in PARTS]
        run = Run("toy", {}, {}, "cpu", "cpu", remeasure=remeasure)
        sweep(table, [task], cells(*pieces)["measure"], run)
        return (capsys.readouterr().out.splitlines() or [""])[0], table

    return run


def test_a_sweep_says_how_many_rows_are_by_other_code(measured):
    assert "stored already" not in measured()[0]
    assert measured()[0] == "toy: 4 rows are stored already"
    said = (
        "toy: 4 rows are stored already, 1 of them by other code; remeasure=True measures it again"
    )
    assert measured("x + 1", "x + 2")[0] == said
    said = "toy: 4 rows are stored already by other code; remeasure=True measures them again"
    assert measured("float(x)", "1.0 * x")[0] == said
    said = (
        "toy: 4 rows are stored already, 1 of them by other code; remeasure=True measures it again"
    )
    assert measured("math.sqrt", "lambda x: 2 * x")[0] == said
    said, table = measured("x + 1", "x + 2", remeasure=True)
    assert "stored already" not in said and len(read_runs(table.data)) == 2
    assert measured("x + 1", "x + 2")[0] == "toy: 4 rows are stored already"


def test_rows_of_runs_that_told_only_their_notebook_are_as_good(measured):
    _, table = measured()
    [recorded] = read_runs(table.data)
    runs_table(table.data).put({**recorded, "source": "244c72d5eb7b"})
    assert measured("float(x)", "1.0 * x")[0] == "toy: 4 rows are stored already"


def test_a_kernel_counts_by_its_function():
    namespace = cells()
    before = sources(namespace["measure"])
    kernel = type("JITFunction", (), {"fn": staticmethod(namespace["plain"])})()
    namespace["MAKE"]["plain"] = namespace["plain"] = kernel
    assert sources(namespace["measure"]) == before
