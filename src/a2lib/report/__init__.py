"""From measured rows to the book: tables, figures and numbers. Measures nothing, imports no torch.

A page builds `Flash()` once and shows its parts; see data.py for where rows come from.
"""

from a2lib.report import drawing, figures, metrics, provenance, style, tables
from a2lib.report.chapters.flash import Flash
from a2lib.report.data import ReportError, load, load_reference, load_runs
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown, Table

__all__ = [
    "Chart", "Flash", "Markdown", "ReportError", "Table", "drawing", "figures",
    "load", "load_reference", "load_runs", "metrics", "provenance", "style", "tables",
]  # fmt: skip
