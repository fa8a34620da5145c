"""The mixed-precision chapter. What it says of rows is chosen from them; what arithmetic predicts
is computed when the page is built, so that it stands without a row.

``rows.Mixed`` holds the rows; ``sums`` (the accumulation loops), ``dtypes`` (autocast),
``layernorm``, ``gains`` (whole models in the GPU's time) and ``speed`` (as called, as published)
say what follows from them.
"""

from a2lib.report.chapters.mixed_precision.rows import Mixed

__all__ = ["Mixed"]
