"""torchrun from Python, for the experiments that are not notebooks of their own yet."""
