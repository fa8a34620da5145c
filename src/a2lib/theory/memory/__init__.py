"""Memory of a training step, by closed forms and tensor by tensor. In the order of reading:

``saved``          what one block keeps for its backward
``tensors``        every tensor of a step, in the order in which PyTorch makes and drops them;
                   ``operations`` goes through the step, ``tape`` keeps what it makes and drops
``allocator``      the blocks that PyTorch's caching allocator takes for such a sequence
``step``           what follows from those two: a step's peak, and where a device runs out
``checkpointing``  what a strategy of checkpointing keeps and computes again, for equal blocks
``strategies``     the peak of a step under such a strategy: ``tensors`` and ``checkpointing``
``keeping``        which products each block keeps, computes again or sends to the host

Elsewhere: attention on its own is ``theory.eager``; ranks that share a model's state are
``theory.sharding`` and ``theory.fsdp``; a layout on many devices is ``theory.layouts``.
"""
