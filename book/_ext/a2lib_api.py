"""The reference of the public functions, made by autodoc from their docstrings.

A docstring shows code as an indented block, and an autograd Function is called by `apply`, which
its docstring says: its constructor has no signature to show. The book is built without torch too,
which these modules import: the page then says so in the place of the docstrings.
"""

from __future__ import annotations

import importlib.util
import inspect
import re

HAS_TORCH = importlib.util.find_spec("torch") is not None
DOCSTRINGS = re.compile(r"^```{eval-rst}\n.*?^```$", re.M | re.S)


def code_blocks(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """Mark each indented block that follows an empty line as code, in place."""
    source, lines[:] = list(lines), []
    is_open = False
    for number, line in enumerate(source):
        is_indented = line.startswith("    ")
        if line and not is_indented:
            is_open = False
        if is_indented and not is_open and number > 0 and not source[number - 1]:
            is_open = True
            if not lines[-2].rstrip().endswith("::"):
                lines += ["::", ""]
        lines.append(line)


def hide_constructor(_app, _what, _name, shown, _options, signature, _returns):
    """Return no signature for an autograd Function, which `apply` calls."""
    if inspect.isclass(shown) and hasattr(shown, "apply") and hasattr(shown, "backward"):
        return "", None
    return signature, None


def leave_out(_app, page: str, source: list[str]) -> None:
    """Say in the page, in place of the docstrings, that they need torch."""
    if page == "api":
        source[0] = DOCSTRINGS.sub(
            "*The docstrings need torch; it is not installed here.*", source[0]
        )


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.config.autodoc_typehints = "none"  # nitpicky: torch's names have no inventory here
    app.config.autodoc_preserve_defaults = True
    app.connect("autodoc-process-docstring", code_blocks)
    app.connect("autodoc-process-signature", hide_constructor)
    if not HAS_TORCH:
        app.connect("source-read", leave_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
