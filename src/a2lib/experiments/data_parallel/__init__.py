"""What the experiments on data parallelism share: a training that several ranks do, each on its own
batch (``configurations``, ``training``), and the times of its ways, taken in turns (``turns``)."""
