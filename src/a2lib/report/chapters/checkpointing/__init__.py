"""The chapter on activation checkpointing. Every sentence is chosen from the data.

``rows.Checkpointing`` holds the rows and what is predicted beside them; ``answer`` (the first
screen and its figure), ``segments`` (the best segment, and every strategy), ``checks`` (prediction
against measurement), ``least`` (the least memory by the number of blocks) and ``local`` say what
follows. Predictions are there without rows.
"""

from a2lib.report.chapters.checkpointing.rows import Checkpointing

__all__ = ["Checkpointing"]
