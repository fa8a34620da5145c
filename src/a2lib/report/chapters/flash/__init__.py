"""The FlashAttention-2 chapter. Every sentence is chosen from the data, and stays true with them.

``rows.Flash`` holds the rows; the other modules say what follows from them: ``answer`` (the first
screen), ``estimate`` (limits before measuring), ``regimes``, ``standing`` (who leads where, and
why), ``ceilings``, ``memory``, ``accuracy``, ``protocol``, ``published`` and ``local``.
"""

from a2lib.report.chapters.flash.rows import Flash

__all__ = ["Flash"]
