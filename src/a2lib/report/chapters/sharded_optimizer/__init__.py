"""The chapter on the sharded optimizer: what dividing its state saves, costs and sends.

from a2lib.report.chapters.sharded_optimizer import Sharding, answer, memory, schemes, times

times.table(Sharding(), "caption", "tab-name")
"""

from a2lib.report.chapters.sharded_optimizer.rows import Sharding

__all__ = ["Sharding"]
