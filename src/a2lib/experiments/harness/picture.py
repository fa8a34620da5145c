"""The figure of a run, as the value of a notebook's cell."""

from __future__ import annotations


def subplots(rows: int = 1, columns: int = 1, **options):
    """A matplotlib figure and its axes, as ``pyplot.subplots`` gives them, which a cell shows once.

    A ``Figure`` of one's own is shown as its name alone, since it is pyplot that tells the notebook
    how to show one; and one that pyplot still holds is shown twice.
    """
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(rows, columns, layout="constrained", **options)
    plt.close(drawn)
    return drawn, axes
