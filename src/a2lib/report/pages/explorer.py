"""One layer over two axes of devices: the example's map of what binds where, and the form of the
explorer, as HTML.

`book/_ext/pages/explorer.js` shows the form, reads it, and writes the answers and the map; without
JavaScript the section says where the example's map is. Starting values are the example's.
"""

import numpy as np

from a2lib.report import style
from a2lib.report.pages import forms
from a2lib.report.pages.forms import Field
from a2lib.report.plots import HEAT
from a2lib.theory import parallelism
from a2lib.theory.parallelism import EXAMPLE

BOUND, FREE, HALF = HEAT[2], HEAT[5], HEAT[4]

# Names are those of Layer, n_fsdp and n_tp.
FIELDS = (
    Field("tokens", "B, the batch", "tokens", 10**9),
    Field("d_model", "D, d_model", "elements", 10**6),
    Field("d_ff", "F, d_ff", "elements", 10**6),
    Field("flops", "C, each device", "TFLOP/s", 10**6, whole=False, least=1e-3, scale=1e12),
    Field("bandwidth", "W, each device", "GB/s", 10**6, whole=False, least=1e-3, scale=1e9),
    Field("element_bytes", "an element has", "bytes", 16, whole=False, least=1e-3),
    Field("n_fsdp", "N_FSDP", "devices", 10**6),
    Field("n_tp", "N_TP", "devices", 10**6),
)
START = vars(EXAMPLE) | {"n_fsdp": 8, "n_tp": 8}
PASSES = {"forward": "forward", "backward": "backward"}
COST_LINES = {
    "compute_s": "computation (ms)",
    "data_s": "FSDP's axis (ms)",
    "tensor_s": "TP's axis (ms)",
    "overlap": "binds, axes at the same time",
    "shared": "binds, axes one after the other",
}
LIMITS = {"n": "N", "at": "at N_FSDP × N_TP"}
LIMIT_LINES = {
    "data": "data parallelism, FSDP",
    "tensor_forward": "TP, forward",
    "tensor_backward": "TP, backward",
    "mesh": "both, axes at the same time",
    "shared_mesh": "both, axes one after the other",
}
SPLITS = {"best": "best", "whole": "in whole numbers", "share": "share"}
SPLIT_LINES = {"overlap": "at the same time", "shared": "one after the other"}


class Explorer:
    """What a notebook's cell returns to show the form."""

    def _repr_html_(self) -> str:
        best = (
            'The best split, forward, of <span data-out="n"></span> devices; its share is '
            "communication over computation"
        )
        most, one = "The largest N that computation bounds", "One pass on this mesh"
        tables = (
            forms.table("costs", one, "time, and what binds", COST_LINES, PASSES),
            forms.table("limits", most, "scheme", LIMIT_LINES, LIMITS),
            forms.table("splits", best, "the axes communicate", SPLIT_LINES, SPLITS),
        )
        fields = forms.fieldset(
            "The layer, the device and the mesh",
            [field.html(START[field.name] / field.scale) for field in FIELDS],
        )
        key = "".join(f"<li>{forms.swatch(drawing)}{words}</li>" for drawing, words in KEY)
        return (
            f"{forms.palette()}"
            "<noscript><p>The explorer needs JavaScript; the map at the top of this page is the "
            "example's.</p></noscript>"
            '<div class="a2-form a2-explorer" id="explorer" hidden>'
            f'<form autocomplete="off">{fields}</form>{forms.STATE}'
            f'{forms.picture("map", 300)}<ul class="a2-key">{key}</ul>'
            f"{''.join(tables)}</div>"
        )


# Of the map's key: the SVG in a square of 16 units, and what it means.
KEY = (
    ('<rect class="free" width="16" height="16"/>', "computation binds, however the axes share"),
    ('<rect class="half" width="16" height="16"/>', "computation binds only if the axes overlap"),
    ('<rect class="bound" width="16" height="16"/>', "communication binds"),
    ('<path class="mine" d="M8 1l7 7l-7 7l-7-7z"/>', "your mesh"),
    ('<path class="same" d="M0 8h16"/>', "as many devices, split otherwise"),
    ('<circle class="point" cx="8" cy="8" r="5"/>', "the most devices, axes one after the other"),
    (
        '<rect class="point" x="3" y="3" width="10" height="10"/>',
        "the most devices, axes at the same time",
    ),
)


@style.chart(height=4.2)
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
        axis.set_major_formatter("{x:g}")
