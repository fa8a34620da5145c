"""Memory of a training step, by closed forms. In the order of reading:

``saved``          what one block keeps for its backward
``step``           what a step holds at its fullest moments, and its peak
``checkpointing``  what a strategy of checkpointing keeps and computes again, for equal blocks
``keeping``        which products each block keeps, computes again or sends to the host

Elsewhere: attention on its own is ``theory.eager``; ranks that share a model's state are
``theory.sharding`` and ``theory.fsdp``; a layout on many devices is ``theory.layouts``. What a step
takes in PyTorch, tensor by tensor, is counted by ``a2lib.lab.tape``.
"""
