"""The committed tables, as they lie: every value a string; and the pages that are about them."""

import csv

from a2lib.paths import ROOT

H200 = "nvidia-h200"
# The book's pages that a person writes about rows, with claims.
WRITTEN = sorted(
    page.stem
    for page in (ROOT / "book").glob("*.md")
    if "from a2lib.report.page import" in page.read_text(encoding="utf-8")
)


def measured(section, device=H200):
    """Return the rows of a section on one device."""
    return _read(ROOT / "data" / "measured" / section / f"{device}.csv")


def reference(name):
    """Figures that others published."""
    return _read(ROOT / "data" / "reference" / f"{name}.csv")


def _read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
