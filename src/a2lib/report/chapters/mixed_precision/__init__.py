"""The mixed-precision chapter. What it says of rows is chosen from them; what arithmetic predicts
is computed when the page is built, so that it stands without a row.

``rows.Mixed`` holds the rows; ``sums`` (the accumulation loops), ``dtypes`` (autocast),
``layernorm`` and ``speed`` (whole models) say what follows from them.
"""

from a2lib.report.chapters.mixed_precision.rows import Mixed

__all__ = ["Mixed"]
