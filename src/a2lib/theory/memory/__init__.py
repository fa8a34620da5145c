"""Memory of a training step, by closed forms. In the order of reading:

``saved``          the tensors that one block saves for its backward
``step``           the bytes of a step at the moments that may be its peak
``checkpointing``  the bytes that a checkpointing strategy saves, and what it recomputes
``keeping``        which matmul outputs a block saves, recomputes or offloads to CPU memory

Elsewhere: attention on its own is ``theory.eager``; ranks that share a model's state are
``theory.sharding`` and ``theory.fsdp``; a layout on many devices is ``theory.layouts``. The tensors
of a step that PyTorch runs are counted by ``a2lib.lab.tape``.
"""
