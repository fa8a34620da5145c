"""Outputs of a running notebook cell, and a progress bar that leaves one line in a saved one."""

import logging
import sys
import threading
import time
from collections.abc import Mapping

WIDTH = 100
EVERY_S = 0.5
TICK_S = 1.0
# Without a rate, which says little where one step takes a hundred times as long as another.
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}]"


def display(
    bundle: Mapping[str, str], *, replaceable: bool = False, metadata: Mapping | None = None
):
    """Show ``bundle``, MIME type to text, in the running cell, and return True, or where it is to
    be ``replaceable`` its handle. None, and nothing is shown, outside of a notebook."""
    from IPython import get_ipython
    from IPython.display import display as show

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    handle = show(dict(bundle), raw=True, metadata=metadata, display_id=replaceable or None)
    return handle or True


def say_nothing(why: str) -> None:
    """Say ``why`` a cell has nothing to show. papermill's plugin knows it by its metadata, and
    takes a section that has nothing else out of the executed notebook."""
    if not display({"text/plain": why}, metadata={"a2lib": "nothing"}):
        print(why)


def quiet_at_the_end() -> None:
    """Keep one line of Jupyter's out of the terminal. papermill ends a kernel by a Ctrl-C first,
    which may meet it in its last message: that is no error, and a cell that is interrupted says so
    itself."""
    logging.getLogger("IPKernelApp").addFilter(_is_of_a_cell)


def _is_of_a_cell(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("KeyboardInterrupt caught in kernel")


class Progress:
    """``total`` steps. In a notebook the bar is one output that is replaced in place (tqdm's own
    would leave every state it had in the file), its clock every second, until it is closed;
    elsewhere it is a line per tenth on stderr."""

    def __init__(self, total: int, what: str, unit: str) -> None:
        self.total, self.what, self.unit, self.n = total, what, unit, 0
        self._text = ""
        self._started = self._shown = time.monotonic()
        self._handle = display({"text/plain": self._line()}, replaceable=True)
        self._closed, self._lock = threading.Event(), threading.Lock()
        if self._handle is not None:
            threading.Thread(target=self._tick, daemon=True).start()

    def step(self, text: str | None = None) -> None:
        self._text = self._text if text is None else text
        before, self.n = self.n, self.n + 1
        self._show(tenth=self.n * 10 // max(1, self.total) > before * 10 // max(1, self.total))

    def say(self, text: str) -> None:
        """Show ``text``, what is going on, behind the bar."""
        self._text = text
        self._show()

    def close(self, text: str = "") -> None:
        """Leave the bar as it is, with a last word."""
        self._text = text
        with self._lock:
            self._closed.set()
        self._show(tenth=True, last=True)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:  # nothing after the last word
                if not self._closed.is_set():
                    self._show()

    def _show(self, *, tenth: bool = False, last: bool = False) -> None:
        now = time.monotonic()
        if self._handle is None:
            if tenth:
                print(self._line(), file=sys.stderr)
        elif last or now - self._shown >= EVERY_S:
            self._shown = now
            self._handle.update({"text/plain": self._line()}, raw=True)

    def _line(self) -> str:
        from tqdm import tqdm

        elapsed = time.monotonic() - self._started
        how = {"bar_format": FORMAT, "ncols": WIDTH, "ascii": False}
        named = {"prefix": self.what, "unit": self.unit}
        bar = tqdm.format_meter(self.n, self.total, elapsed, **named, **how)
        return f"{bar} {self._text}".rstrip()
