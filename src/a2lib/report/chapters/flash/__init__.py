"""The FlashAttention-2 chapter. Every sentence is chosen from the data, and stays true with them.

``rows.Flash`` holds the rows, ``view`` says what is compared along what, ``shapes`` at which
shapes; ``figures``, ``tables`` and ``drawing`` show it. The others say what follows: ``answer``
(the first screen), ``estimate`` (limits before measuring), ``counters`` (what the hardware
counted), ``regimes``, ``standing`` (who leads where), ``reasons`` (why), ``ceilings``, ``memory``,
``accuracy``, ``protocol``, ``board`` (beside the public leaderboard, and the two machines),
``published``, ``gaps`` (what is missing) and ``local``.
"""

from a2lib.report.chapters.flash.rows import Flash

__all__ = ["Flash"]
