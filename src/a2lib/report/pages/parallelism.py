"""One layer over two axes of devices: the map of what binds where."""

import numpy as np

from a2lib.report import style
from a2lib.report.style import chart
from a2lib.theory import parallelism
from a2lib.theory.parallelism import EXAMPLE

BOUND, FREE, HALF = "#fbe9da", "#b5d2f0", "#dce9f7"


@chart(height=4.2)
def mesh_map(figure):
    """Where the example's forward is bound by what, over the devices of each axis, logarithmic; the
    most devices if the axes share links (circle) and if each has its own (square)."""
    a, b = float(parallelism.data_slope(EXAMPLE)), float(parallelism.tensor_slope(EXAMPLE))
    right, top, offset = 4 * (1 + a), 4 * (1 + b), {"textcoords": "offset points"}
    ax = figure.add_subplot()
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(1, right), ylim=(1, top), facecolor=BOUND)
    ax.grid(False)
    x = np.geomspace(1, 1 + a, 200)
    ax.fill_between([1, 1 + a], 1, 1 + b, color=HALF, linewidth=0)
    ax.fill_between(x, 1, np.maximum(1 + b * (1 - (x - 1) / a), 1), color=FREE, linewidth=0)
    wide = np.geomspace(1, right, 60)
    for n in (8, 32, 128, 512):
        ax.plot(wide, n / wide, color=style.DIM, linewidth=0.8, linestyle=":")
        height = 3 if n < 1 + b else 2.4 * (1 + b)
        words = f"{n} devices" if n == 8 else f"{n}"
        ax.annotate(words, (n / height, height), xytext=(3, 3), color=style.DIM, **offset)
    for point, marker in ((parallelism.shared_mesh_split(EXAMPLE), "o"), ((1 + a, 1 + b), "s")):
        ax.plot(*point, marker=marker, color=style.COLOURS[0], markersize=8, zorder=5)
        most = f"{point[0] * point[1]:.0f}"
        ax.annotate(most, point, xytext=(7, 5), fontweight="bold", **offset)
    ax.text(1.15, 1.1, "computation binds", va="bottom")
    ax.text(1 + a, 1.12, "only with links\nfor each axis ", va="bottom", ha="right")
    ax.text(1.06 * (1 + a), 1.4, "FSDP's\nmessages\nbind", va="bottom")
    ax.text(2, 1.35 * (1 + b), "tensor parallelism's messages bind", va="bottom")
    ax.set(xlabel="FSDP devices", ylabel="tensor-parallel devices")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
