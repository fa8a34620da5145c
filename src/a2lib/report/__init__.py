"""From measured rows to the book: claims, numbers, tables and figures. Measures nothing, imports no
torch.

What is here serves every page and names none: ``page`` (rows, claims, what a page is written with),
``units`` (numbers as text), ``data`` (rows as they are read), ``tables``, ``plots`` and ``traces``
(figures), ``provenance`` (where rows come from), ``questions`` (how far each is
answered). What one page derives and draws is in ``pages``.
"""

try:
    import matplotlib  # noqa: F401
    import pandas  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a2lib.report needs {error.name}, of the extra 'book': pip install -e '.[book]'"
    ) from None
