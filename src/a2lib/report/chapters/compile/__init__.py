"""The chapter on torch.compile. Every sentence is chosen from the data.

``rows.Compile`` holds the rows; ``answer`` (the first screen, times of attention), ``reasons``
(kernels and bytes beside the times), ``models`` (whole models), ``cost`` (what compiling takes and
when it has paid), ``published`` and ``local`` say what follows from them. Without rows each says
so.
"""

from a2lib.report.chapters.compile.rows import Compile

__all__ = ["Compile"]
