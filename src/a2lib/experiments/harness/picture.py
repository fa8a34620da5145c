"""The figure of a run, as the value of a notebook's cell."""

from __future__ import annotations

LONGEST = 22  # names that a figure of four inches has room for below each other


def subplots(rows: int = 1, columns: int = 1, **options):
    """A matplotlib figure and its axes, as ``pyplot.subplots`` gives them, which a cell shows once.

    A ``Figure`` of one's own is shown as its name alone, since it is pyplot that tells the notebook
    how to show one; and one that pyplot still holds is shown twice.
    """
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(rows, columns, layout="constrained", **options)
    plt.close(drawn)
    return drawn, axes


def legend_beside(figure, ax) -> None:
    """The names of the lines of ``ax`` at the right of the figure, where they hide none of them."""
    named = ax.get_legend_handles_labels()
    columns = -(-len(named[1]) // LONGEST)
    figure.legend(*named, loc="outside right upper", fontsize=7, ncols=columns)
