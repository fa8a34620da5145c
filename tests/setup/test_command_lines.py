"""Every number on a command line has a largest value that is said; what a command prints is JSON.

The options are those that the parsers have, so that a new one without bounds fails here.
"""

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from refusals import refused_command

from a2lib import benchmark, leaderboard
from a2lib.command import Number, Whole
from a2lib.theory import __main__ as theory

PARSERS = {
    "benchmark": (benchmark.parser(), benchmark.parse),
    "leaderboard": (leaderboard.parser(), functools.partial(leaderboard.parse, device="cpu")),
    "theory": (theory.parser(), theory.main),
}
# Options whose value is a name or a path.
TEXT = set(
    "size mode precision attention compile checkpointing device nvtx "
    "way optimizer activations sharding hidden schedule".split()
)
TAKING = []
for name, (parser, _) in PARSERS.items():
    for action in parser._actions:
        if action.nargs != 0:
            TAKING.append((name, action))
NUMBERS = [(name, action) for name, action in TAKING if action.dest not in TEXT]
IDS = [f"{name} {action.option_strings[0]}" for name, action in NUMBERS]


def test_what_is_no_text_is_a_number_with_bounds():
    assert {name for name, _ in NUMBERS} == set(PARSERS)
    for name, action in TAKING:
        assert action.dest in TEXT or isinstance(action.type, (Whole, Number)), (
            f"{action.option_strings[0]} of {name} is a number without a largest value "
            "(a2lib.command), or a text that TEXT lacks"
        )
        if action.dest in TEXT:
            assert action.type in (None, str) and not isinstance(action.default, int | float)


@pytest.mark.parametrize("name, action", NUMBERS, ids=IDS)
def test_each_number_says_its_bounds_and_keeps_to_them(name, action, capsys):
    parser, run = PARSERS[name]
    kind, option = action.type, action.option_strings[0]
    assert kind.minimum < kind.maximum < 1e30
    text = " ".join(parser.format_help().split())
    (said,) = re.findall(rf" {option} N (.*?)(?= --|$)", text.partition("options:")[2])
    assert str(kind) in said
    assert action.default is None or kind.minimum <= action.default <= kind.maximum
    for value in (kind.minimum, kind.maximum):
        assert kind(str(value)) == value
    outside = [str(2 * kind.maximum), str(kind.minimum - 1), "9" * 20, "9" * 90, "9" * 5000]
    nowhere = ["inf", "-inf", "nan", "1e308", "1e999", "-1e-300", "", "two", "1\n2"]
    numbers = "whole numbers" if isinstance(kind, Whole) else "numbers"
    for value in (*outside, *nowhere):
        line = refused_command(run, [f"{option}={value}"], capsys)
        assert len(line) < 300
        assert f"argument {option}: " in line and f"allowed are {numbers} {kind}" in line
    if kind.minimum > 0:
        assert str(kind) in refused_command(run, [f"{option}=1e-300"], capsys)


def test_the_answers_are_numbers_at_every_corner(capsys):
    """What is printed is JSON without NaN and Infinity."""
    kinds = {action.option_strings[0]: action.type for name, action in NUMBERS if name == "theory"}
    for ends in itertools.product(("minimum", "maximum"), repeat=len(kinds)):
        options = []
        for (option, kind), end in zip(kinds.items(), ends, strict=True):
            options.append(f"{option}={getattr(kind, end)}")
        assert theory.main([*options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize("line", ["theory", "theory --help"])
def test_a_reader_that_has_had_enough_ends_a_command_in_silence(line):
    """As ``head`` does. Of a help that is not read a newer argparse (3.11.7's) says nothing."""
    unread, end = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", *f"a2lib.{line}".split()]
    with open(end, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300)
    ends = {-signal.SIGPIPE, 0} if "--help" in line else {-signal.SIGPIPE}
    assert done.returncode in ends
    assert "Error" not in done.stderr


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as out:
        command = [sys.executable, "-m", "a2lib.theory"]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300)
    words = "standard output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, words)
