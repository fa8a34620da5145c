"""Parallelism: a map of the bottleneck of a forward on two axes of devices."""

import math

import numpy as np

from a2lib.report.plots import HEAT, label
from a2lib.report.style import COLOURS, chart
from a2lib.theory import parallelism
from a2lib.theory.parallelism import EXAMPLE

COMMUNICATION_BINDS, COMPUTATION_BINDS, LINKS_DECIDE = HEAT[2], HEAT[5], HEAT[4]


@chart(height=4.2)
def mesh_map(figure):
    """Draw the bottleneck of the example's forward over the devices of each axis, and the largest
    mesh if the axes share links (circle) and if each has its own (square)."""
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
    for is_shared, marker in ((True, "o"), (False, "s")):
        mesh = parallelism.largest_mesh(EXAMPLE, shared=is_shared)
        ax.plot(*mesh, marker=marker, color=COLOURS[0], markersize=8, zorder=5)
        label(ax, f"{math.prod(mesh)} devices", mesh, (-6, -14), fontweight="bold", ha="right")
    ax.text(1.15, 1.1, "compute-bound", va="bottom")
    ax.text(1.15, 0.8 * (1 + b), "compute-bound only if\neach axis has its own links", va="top")
    ax.text(1.06 * (1 + a), 1.2, "bottleneck:\nFSDP's\nall-gathers", va="bottom")
    ax.text(1.15, 1.4 * (1 + b), "bottleneck: tensor\nparallelism's all-reduces", va="bottom")
    ax.text(1.06 * (1 + a), 1.4 * (1 + b), "both take\ntoo long", va="bottom")
    ax.set(xlabel="FSDP devices", ylabel="tensor-parallel devices")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
