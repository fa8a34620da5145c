"""What the tests of both commands do with what they print."""

import json

import pytest

from a2lib.theory import __main__ as command


@pytest.fixture
def printed(capsys):
    """``printed(line)``: what the command prints; with --json the object."""

    def run(line=""):
        assert command.main(line.split()) == 0
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in line else text

    return run
