"""The chapter on fully sharded data parallel: what a rank holds, and whether its weights come in
time.

    from a2lib.report.chapters.fsdp import Fsdp, answer, gathers, local, memory, targets

    memory.figure(Fsdp())
"""

from a2lib.report.chapters.fsdp.rows import Fsdp

__all__ = ["Fsdp"]
