"""Show how far a sweep is: one line, in the saved notebook and in a terminal as well.

papermill shows no output of a cell while it runs. Its plugin (`a2lib.papermill_default`) therefore
names the terminal in `$A2LIB_TERMINAL`, and the same line is written there; a script's is the one
of its standard error.
"""

import contextlib
import os
import sys
import time
from collections import Counter

from a2lib.paths import TERMINAL

WIDTH = 100
EVERY_S = 0.5


class Progress:
    """Show how many of `total` rows are done, the time they took and what is left of it, by those
    that did not fail: a failure takes no time, or another one.

    In a notebook the line is one output, replaced in place. Its owner calls `show` now and then, so
    that the time goes on between rows.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self._text = ""
        self._failed: Counter[str] = Counter()
        self._started = self._shown = time.monotonic()
        self._output = _display(self._line())
        self._terminal = _open_terminal(is_script=self._output is None)

    def advance(self, steps: int = 1, status: str = "ok") -> None:
        """Count `steps` more as done; with another `status` than "ok" they failed."""
        self.done += steps
        if steps and status != "ok":
            self._failed[status] += steps
        self.show()

    def say(self, text: str) -> None:
        """Show `text`, what is going on, behind the rest."""
        self._text = text
        self.show()

    def show(self, last: bool = False) -> None:
        """Bring what is shown up to date, unless it was so a moment ago."""
        now = time.monotonic()
        if now - self._shown < EVERY_S and not last:
            return
        self._shown = now
        line = self._line()
        if self._output:
            self._output.update({"text/plain": line}, raw=True)
        if self._terminal:
            with contextlib.suppress(OSError):  # the terminal may have gone
                columns = os.get_terminal_size(self._terminal.fileno()).columns or WIDTH
                width = min(WIDTH, columns) - 1  # at the edge it would go on in the next line
                self._terminal.write(f"\r{line[:width]:{width}}")
                self._terminal.flush()

    def close(self) -> None:
        """Leave the line as it is."""
        self._text = ""
        self.show(last=True)
        if self._terminal:
            with contextlib.suppress(OSError):
                self._terminal.write("\n")
                self._terminal.close()
            self._terminal = None

    def _line(self) -> str:
        seconds = time.monotonic() - self._started
        words = [f"{self.what}: {self.done}/{self.total} rows"]
        for status, number in self._failed.items():
            words.append(f"{number} {status}")
        words.append(_clock(seconds))
        measured = self.done - self._failed.total()
        if measured and self.done < self.total:
            words.append(f"{_clock(seconds / measured * (self.total - self.done))} left")
        if self._text:
            words.append(self._text)
        return ", ".join(words)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def _open_terminal(is_script: bool):
    """Return the terminal of the command that runs this notebook or this script, or None."""
    path = os.environ.get(TERMINAL)
    with contextlib.suppress(OSError):
        if not path and is_script:
            path = os.ttyname(2)
        if path:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
    return None


def _display(text: str):
    """Show `text` in the running cell and return the output's handle, or None outside of one."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return display({"text/plain": text}, raw=True, display_id=True)
