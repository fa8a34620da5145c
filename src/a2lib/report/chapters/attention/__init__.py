"""The chapter on attention in plain PyTorch. Every sentence is chosen from the data.

``rows.Plain`` holds the rows; ``answer`` (the first screen, the grid), ``memory`` (every byte, and
where it ends), ``estimate`` (the floor beside the measured), ``published`` and ``local`` say what
follows from them. What arithmetic alone says is there without rows.
"""

from a2lib.report.chapters.attention.rows import Plain

__all__ = ["Plain"]
