"""What the tests of both commands do with what they print."""

import json

import pytest

from a2lib.theory import __main__ as command


@pytest.fixture
def printed(capsys):
    """``printed(*arguments)``: what the command prints; with --json the object."""

    def run(*arguments):
        assert command.main([*arguments]) == 0
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in arguments else text

    return run
