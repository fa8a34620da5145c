"""The chapter on collectives of one node. Every sentence is chosen from the data.

``rows.Collectives`` holds the rows; ``answer`` (the first screen, tables, how the factors
interact), ``line`` (latency and bandwidth, fitted and held against the times), ``buckets`` (what
that says of their best size), ``published`` and ``local`` say what follows from them. What
arithmetic alone says is there without rows.
"""

from a2lib.report.chapters.collectives.rows import Collectives

__all__ = ["Collectives"]
