"""The chapter on benchmarking a training step. Every sentence is chosen from the data.

``rows.Benchmark`` holds the rows; ``answer`` (the first screen and the tables of times),
``warmup`` (steps one by one), ``first`` (the first taken apart), ``estimate`` (the floor beside the
measured), ``speed`` (our attention, the targets), ``rest`` (what a step takes beyond its floor),
``updates`` (the step with this library's AdamW), ``power`` (the energy of a step), ``published``
and ``local`` say what follows.
Without rows each says so.
"""

from a2lib.report.chapters.benchmark.rows import Benchmark

__all__ = ["Benchmark"]
