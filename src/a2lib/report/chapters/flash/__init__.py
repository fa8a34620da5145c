"""The FlashAttention-2 chapter. Every sentence is chosen from the data, and stays true with them.

``rows.Flash`` holds the rows; the other modules say what follows from them: ``answer`` (the first
screen), ``estimate`` (limits before measuring), ``counters`` (what the hardware counted),
``regimes``, ``standing`` (who leads where), ``reasons`` (why), ``ceilings``, ``memory``,
``accuracy``, ``protocol``, ``board`` (beside the public leaderboard, and the two machines),
``published``, ``gaps`` (what is missing) and ``local``.
"""

from a2lib.report.chapters.flash.rows import Flash

__all__ = ["Flash"]
