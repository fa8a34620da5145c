"""Outputs of a running notebook cell."""

from __future__ import annotations

import logging
from collections.abc import Mapping


def display(
    bundle: Mapping[str, str], *, replaceable: bool = False, metadata: Mapping | None = None
):
    """Show ``bundle``, MIME type to text, in the running cell, and return True, or where it is to
    be ``replaceable`` its handle. None, and nothing is shown, outside of a notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import display as show
    except ImportError:
        return None
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
