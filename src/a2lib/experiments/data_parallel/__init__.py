"""Training steps that several ranks take together: what ``ddp``, ``fsdp`` and ``sharded_optimizer``
measure. ``configurations`` is what is asked for, ``times`` and ``memory`` what each rank does."""
