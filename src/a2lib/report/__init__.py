"""From measured rows to the book: tables, figures and numbers. Measures nothing, imports no torch.

What is here serves every section and names none: ``data`` (rows), ``view`` (what a section compares
and how its columns are written), ``metrics``, ``tables``, ``figures`` and ``panels`` (small
multiples), ``drawing``, ``provenance`` (the line under a figure), ``local`` (On your machine). What
one chapter says is in ``chapters``.
"""

from a2lib.report import drawing, figures, local, metrics, provenance, style, tables
from a2lib.report.data import ReportError, load, load_reference, load_runs
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown, Table
from a2lib.report.view import View

__all__ = [
    "Chart", "Markdown", "ReportError", "Table", "View", "drawing", "figures", "load",
    "load_reference", "load_runs", "local", "metrics", "provenance", "style", "tables",
]  # fmt: skip
