"""Parse options and write output, for every command.

An error is one line, a number has a least and a largest value, and a reader that has had enough
ends the command.
"""

import argparse
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.errors import none_of

_SHOWN = 40  # characters of a refused value


class Parser(argparse.ArgumentParser):
    """End with exit code 2 and one line for a wrong option; no option can be abbreviated."""

    def __init__(self, **texts: str) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **texts
        )

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")

    def parse_args(self, arguments=None, namespace=None) -> argparse.Namespace:
        """Parse as argparse does, and name the options there are where one is unknown."""
        options, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            names = []
            for action in self._actions:
                names += [name for name in action.option_strings if name.startswith("--")]
            self.error(f"unknown {none_of(names, unknown[0])}")
        return options


@dataclass(frozen=True)
class Number:
    """Read an option's number from ``minimum`` to ``maximum``; neither nan nor inf is one."""

    minimum: float
    maximum: float
    read, form, words = float, "g", "numbers"

    def __str__(self) -> str:
        return f"from {self.minimum:{self.form}} to {self.maximum:{self.form}}"

    def __call__(self, text: str) -> float:
        try:
            value = self.read(text)
        except ValueError:  # also where a whole one has thousands of digits
            value = math.nan
        if not self.minimum <= value <= self.maximum:
            raise _refused(text, f"{self.words} {self}")
        return value


class Whole(Number):
    """Read a whole number so."""

    read, form, words = int, "d", "whole numbers"


def add_number(to, option: str, kind: Number, words: str, default=None) -> None:
    """Add an option to a parser or to a group of one; its help ends with what is allowed, and with
    the default if there is one."""
    shown = "" if default is None else f" ({default:g})"
    to.add_argument(option, type=kind, default=default, help=f"{words}, {kind}{shown}", metavar="N")


def add_name(to, option: str, words: str, default: str | None = None) -> None:
    """Add an option whose value is text; its help ends with the default if there is one."""
    shown = "" if default is None else f" ({default})"
    to.add_argument(option, default=default, help=f"{words}{shown}", metavar="NAME")


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Write a command's answer within this context.

    Whoever reads no further, as ``head`` does, ends the command in silence by SIGPIPE, which Python
    has made an exception; what cannot be written is one line.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python tries once more when it ends
        raise SystemExit(f"standard output could not be written: {error.strerror}") from None


def _refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    shown = text if text.isprintable() else repr(text)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}... ({len(text)} characters)"
    return argparse.ArgumentTypeError(f"{shown}: allowed are {allowed}")
