"""The chapter on distributed data parallel: what each way to average gradients adds to a step.

    from a2lib.report.chapters.ddp import Ddp, answer, ways

    ways.table(Ddp(), "xl25", False, "caption", "tab-name")
"""

from a2lib.report.chapters.ddp.rows import Ddp

__all__ = ["Ddp"]
