"""Parallelism: a map of the bottleneck of a forward on two axes of devices."""

import numpy as np

from a2lib.report.plots import HEAT, label
from a2lib.report.style import COLOURS, DIM, chart
from a2lib.theory import parallelism
from a2lib.theory.parallelism import EXAMPLE

COMMUNICATION_BINDS, COMPUTATION_BINDS, LINKS_DECIDE = HEAT[2], HEAT[5], HEAT[4]


@chart(height=4.2)
def mesh_map(figure):
    """Draw the bottleneck of the example's forward over the devices of each axis, and the most
    devices if the axes share links (circle) and if each has its own (square)."""
    a, b = float(parallelism.data_slope(EXAMPLE)), float(parallelism.tensor_slope(EXAMPLE))
    right, top = 4 * (1 + a), 4 * (1 + b)
    ax = figure.add_subplot()
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(1, right), ylim=(1, top), facecolor=COMMUNICATION_BINDS)
    ax.grid(False)
    x = np.geomspace(1, 1 + a, 200)
    ax.fill_between([1, 1 + a], 1, 1 + b, color=LINKS_DECIDE, linewidth=0)
    shared = np.maximum(1 + b * (1 - (x - 1) / a), 1)
    ax.fill_between(x, 1, shared, color=COMPUTATION_BINDS, linewidth=0)
    wide = np.geomspace(1, right, 60)
    for n in (8, 32, 128, 512):
        ax.plot(wide, n / wide, color=DIM, linewidth=0.8, linestyle=":")
        height = 3 if n < 1 + b else 2.4 * (1 + b)
        words = f"{n} devices" if n == 8 else f"{n}"
        label(ax, words, (n / height, height), (3, 3), color=DIM)
    for point, marker in ((parallelism.shared_mesh_split(EXAMPLE), "o"), ((1 + a, 1 + b), "s")):
        ax.plot(*point, marker=marker, color=COLOURS[0], markersize=8, zorder=5)
        most = f"{point[0] * point[1]:.0f}"
        label(ax, most, point, (7, 5), fontweight="bold")
    ax.text(1.15, 1.1, "compute-bound", va="bottom")
    ax.text(1.06 * (1 + a), 1.2, "bottleneck:\nFSDP's\nall-gathers", va="bottom")
    ax.text(1.15, 3.2 * (1 + b), "bottleneck: tensor parallelism's all-reduces")
    line = {"arrowstyle": "-", "color": DIM, "linewidth": 0.8}
    inside = (0.75 * (1 + a), 0.75 * (1 + b))
    words = "compute-bound only if\neach axis has its own links"
    ax.annotate(words, inside, (1.15, 1.35 * (1 + b)), va="bottom", arrowprops=line)
    ax.set(xlabel="FSDP devices", ylabel="tensor-parallel devices")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
