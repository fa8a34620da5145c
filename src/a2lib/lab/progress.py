"""A progress bar that a saved notebook shows as one line, and a terminal as well.

papermill shows no output of a cell while it runs. Its plugin (`a2lib.papermill_default`) therefore
names the terminal in `$A2LIB_TERMINAL`, and the same line is written there.
"""

import contextlib
import os
import sys
import threading
import time
from collections import Counter

from a2lib.paths import TERMINAL

WIDTH = 100
EVERY_S = 0.5
TICK_S = 1.0
# Without a rate, which says little where one step takes a hundred times as long as another.
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<"


class Progress:
    """Show how many of `total` steps are done, the time they took and what is left of it, by those
    that did not fail: a failure takes no time, or another one.

    In a notebook the bar is one output, replaced in place (tqdm's own would leave every state in
    the file). Elsewhere it is a line on standard error for each tenth.
    """

    def __init__(self, total: int, what: str, unit: str = "rows") -> None:
        self.total, self.what, self.unit, self.done = total, what, unit, 0
        self._text = ""
        self._failed: Counter[str] = Counter()
        self._started = self._shown = self._came = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._terminal = open_terminal()
        self._output = _display(self._line())
        if self._output or self._terminal:
            threading.Thread(target=self._tick, daemon=True).start()

    def advance(self, steps: int = 1, status: str = "ok") -> None:
        """Count `steps` more as done; with another `status` than "ok" they failed."""
        tenths = self._tenths()
        self.done += steps
        self._failed[status] += 0 if status == "ok" else steps
        self._came = time.monotonic()
        if not (self._output or self._terminal) and self._tenths() > tenths:
            print(self._line(), file=sys.stderr)
        self._show()

    def say(self, text: str) -> None:
        """Show `text`, what is going on, behind the bar."""
        self._text = text
        self._show()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._text = ""
        self._closed.set()
        self._show(last=True)
        if self._terminal:
            with contextlib.suppress(OSError):
                self._terminal.write("\n")
                self._terminal.close()
            self._terminal = None

    def _tenths(self) -> int:
        return 10 * self.done // max(1, self.total)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self._show()

    def _show(self, last: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            if not last and (self._closed.is_set() or now - self._shown < EVERY_S):
                return
            self._shown = now
            line = self._line()
            if self._output:
                self._output.update({"text/plain": line}, raw=True)
            if self._terminal:
                with contextlib.suppress(OSError):  # the terminal may have gone
                    width = _columns(self._terminal)
                    self._terminal.write(f"\r{line:{width}}"[: width + 1])
                    self._terminal.flush()

    def _line(self) -> str:
        from tqdm import tqdm

        now = time.monotonic()
        seconds = self._left_s(now)
        left = "?" if seconds is None else tqdm.format_interval(seconds)
        bar = tqdm.format_meter(
            self.done,
            self.total,
            now - self._started,
            prefix=self.what,
            unit=self.unit,
            bar_format=f"{FORMAT}{left}]",
            ncols=WIDTH - 30,
            ascii=False,
        )
        failed = [f"{number} {status}" for status, number in self._failed.items() if number]
        return " ".join([bar, *failed, self._text]).rstrip()

    def _left_s(self, now: float) -> float | None:
        """Return the seconds that are left; None where nothing is measured yet, or nothing came for
        longer than was left at the last row."""
        measured = self.done - self._failed.total()
        if self.done >= self.total:
            return 0
        if measured == 0:
            return None
        a_row = (self._came - self._started) / measured
        left = a_row * (self.total - self.done) - (now - self._came)
        return left if left >= 0 else None


def say(text: str) -> None:
    """Print a line in the running cell, and on the terminal of the command that runs it."""
    print(text)
    terminal = open_terminal()
    if terminal:
        with terminal, contextlib.suppress(OSError):
            terminal.write(f"{text}\n")


def open_terminal():
    """Return the terminal of the command that runs this notebook, or None."""
    path = os.environ.get(TERMINAL)
    if not path:
        return None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
    return None


def _columns(terminal) -> int:
    """Return the columns of a line that is replaced in place: one that reaches the edge moves on to
    the next, and stays."""
    columns = os.get_terminal_size(terminal.fileno()).columns
    return min(WIDTH, columns - 1) if columns else WIDTH


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
