"""What is refused is said in one line."""

import re

import pytest


def refused(words, call, *given, error=ValueError, **named):
    """``call(*given, **named)`` raises ``error``, in a line that has ``words`` (a pattern); the
    error."""
    with pytest.raises(error) as raised:
        call(*given, **named)
    line = str(raised.value)
    assert re.search(words, line) and "\n" not in line, line
    return raised.value


def refused_command(main, arguments, capsys):
    """``main(arguments)`` ends with exit code 2, nothing printed but how it is used and one line of
    an error; that line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, errors = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), errors
    usage, line = errors.splitlines()
    assert usage.startswith("usage: ")
    return line
