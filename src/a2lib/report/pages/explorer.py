"""The form of the explorer, as HTML: what a reader can set, and where the answers go.

`book/_ext/pages/explorer.js` shows it, reads it, and writes the answers and the map; without
JavaScript the section says where the example's map is. Starting values are the example's.
"""

from a2lib.report.pages import forms
from a2lib.report.pages.forms import Field
from a2lib.theory.parallelism import EXAMPLE

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
            f'{forms.picture("map", 360, 300)}<ul class="a2-key">{key}</ul>'
            f"{''.join(tables)}</div>"
        )

    def __repr__(self) -> str:
        return "Explorer()"


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
