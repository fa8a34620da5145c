"""Every number on a command line has a largest value that is said; what a command prints is JSON.

The options are those that the parsers have: one that has no bounds fails here, or is a TEXT.
"""

import functools
import itertools
import json

import pytest
from refusals import refused_command

from a2lib import benchmark, leaderboard
from a2lib.command import Whole
from a2lib.theory import __main__ as theory

PARSERS = {
    "benchmark": (benchmark.parser(), benchmark.parse),
    "leaderboard": (leaderboard.parser(), functools.partial(leaderboard.parse, device="cpu")),
    "theory": (theory.parser(), theory.main),
}
# Options whose value is a name or a path.
TEXT = set("size mode precision attention compile checkpointing nvtx way".split())
NUMBERS, IDS = [], []
for name, (parser, _) in PARSERS.items():
    for action in parser._actions:
        if action.nargs != 0 and action.dest not in TEXT:
            NUMBERS.append((name, action))
            IDS.append(f"{name} {action.option_strings[0]}")


@pytest.mark.parametrize("name, action", NUMBERS, ids=IDS)
def test_each_number_says_its_bounds_and_keeps_to_them(name, action, capsys):
    _, run = PARSERS[name]
    kind, option = action.type, action.option_strings[0]
    assert kind.minimum < kind.maximum < 1e30
    assert action.default is None or kind.minimum <= action.default <= kind.maximum
    for value in (kind.minimum, kind.maximum):
        assert kind(str(value)) == value
    numbers = "whole numbers" if isinstance(kind, Whole) else "numbers"
    for value in (str(2 * kind.maximum), str(kind.minimum - 1), "nan", "1e999", "two"):
        line = refused_command(run, [f"{option}={value}"], capsys)
        assert len(line) < 300
        assert f"argument {option}: " in line and f"allowed are {numbers} {kind}" in line


def test_the_answers_are_numbers_at_every_corner(capsys):
    """What is printed is JSON without NaN and Infinity."""
    kinds = {action.option_strings[0]: action.type for name, action in NUMBERS if name == "theory"}
    for ends in itertools.product(("minimum", "maximum"), repeat=len(kinds)):
        options = []
        for (option, kind), end in zip(kinds.items(), ends, strict=True):
            options.append(f"{option}={getattr(kind, end)}")
        assert theory.main([*options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
