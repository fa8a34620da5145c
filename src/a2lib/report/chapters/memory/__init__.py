"""The chapter on where the memory of a step goes. Every sentence is chosen from the data.

``rows.Memory`` holds the rows; ``answer`` (the first screen), ``peaks`` (those of every size),
``fitting`` (what ran out of memory), ``nearness`` (how near the counts are), ``steps`` (the first
beside the second), ``timeline`` (bytes over a step), ``precision`` (bf16 beside fp32), ``largest``
(tensors and the lines that asked for them), ``block`` (what one block keeps, its gradients),
``published`` and ``local`` say what follows from them. What counting alone says is there without
rows.
"""

from a2lib.report.chapters.memory.rows import Memory

__all__ = ["Memory"]
