"""Show a reader the errors of this library: one line each."""

import difflib
import re
from collections.abc import Iterable


class OneLine:
    """Mixed into an exception whose message says all there is to say, on one line.

    IPython shows the lines of ``_render_traceback_`` in place of a traceback, and papermill repeats
    them.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UnsupportedError(RuntimeError):
    """This implementation cannot run these inputs here; the message says why and what can."""


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The entry of ``allowed`` that ``name`` probably stands for: case, underscores, a typo."""
    plain = {re.sub(r"[\W_]", "", entry).lower(): entry for entry in allowed}
    found = difflib.get_close_matches(
        re.sub(r"[\W_]", "", str(name)).lower(), plain, n=1, cutoff=0.7
    )
    return plain[found[0]] if found else None


def none_of(allowed: Iterable[str], name: str) -> str:
    """Return a ``name`` that is none of ``allowed``, and the words for it."""
    meant = closest(name, allowed)
    hint = f" (did you mean {meant}?)" if meant else ""
    return f"{name}{hint}; allowed are {', '.join(allowed)}"
