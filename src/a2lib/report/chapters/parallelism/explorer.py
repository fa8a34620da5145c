"""The form of the explorer, as HTML: what a reader can set, and where the answers go.

`book/_ext/pages/explorer.js` shows it, reads it, and writes the answers and the map; without
JavaScript the section says where the example's map is. Starting values are the example's.
"""

from __future__ import annotations

from dataclasses import dataclass

from a2lib.report import svg
from a2lib.theory.parallelism import EXAMPLE, Layer


@dataclass(frozen=True)
class Field:
    """A number that a reader sets, from ``least`` to ``most``: a whole one, or any.

    ``name`` is the field of Layer, n_fsdp or n_tp; the form's unit is ``scale`` of the theory's.
    """

    name: str
    label: str
    unit: str
    most: int
    whole: bool = True
    scale: float = 1

    @property
    def least(self) -> float:
        return 1 if self.whole else 0.001


FIELDS = (
    Field("tokens", "B, the batch", "tokens", 10**9),
    Field("d_model", "D, d_model", "elements", 10**6),
    Field("d_ff", "F, d_ff", "elements", 10**6),
    Field("flops", "C, each device", "TFLOP/s", 10**6, whole=False, scale=1e12),
    Field("bandwidth", "W, each device", "GB/s", 10**6, whole=False, scale=1e9),
    Field("element_bytes", "an element has", "bytes", 16, whole=False),
    Field("n_fsdp", "N_FSDP", "devices", 10**6),
    Field("n_tp", "N_TP", "devices", 10**6),
)
START = {"n_fsdp": 8, "n_tp": 8}
PASSES = ("forward", "backward")
COST_LINES = {
    "compute_s": "computation (ms)",
    "data_s": "FSDP's axis (ms)",
    "tensor_s": "TP's axis (ms)",
    "overlap": "binds, axes at the same time",
    "shared": "binds, axes one after the other",
}
LIMIT_LINES = {
    "data": "data parallelism, FSDP",
    "tensor_forward": "TP, forward",
    "tensor_backward": "TP, backward",
    "mesh": "both, axes at the same time",
    "shared_mesh": "both, axes one after the other",
}
SPLIT_LINES = {"overlap": "at the same time", "shared": "one after the other"}


class Explorer:
    """What a notebook's cell returns to show the form."""

    def __init__(self, layer: Layer = EXAMPLE):
        self.start = {
            field.name: (START | vars(layer))[field.name] / field.scale for field in FIELDS
        }

    def _repr_html_(self) -> str:
        inputs = "".join(_input(field, self.start[field.name]) for field in FIELDS)
        costs = _table(
            "One pass on this mesh", "time, and what binds", PASSES, "costs", COST_LINES, PASSES
        )
        limits = _table(
            "The largest N that computation bounds", "scheme", ("N", "at N_FSDP × N_TP"),
            "limits", LIMIT_LINES, ("n", "at"),
        )  # fmt: skip
        splits = _table(
            'The best split, forward, of <span data-out="n"></span> devices; its share is '
            "communication over computation",
            "the axes communicate", ("best", "in whole numbers", "share"),
            "splits", SPLIT_LINES, ("best", "whole", "share"),
        )  # fmt: skip
        return (
            f"<style>{palette()}</style>"
            "<noscript><p>The explorer needs JavaScript; the map at the top of this page is the "
            "example's.</p></noscript>"
            '<div class="a2-explorer" hidden>'
            '<form autocomplete="off"><fieldset><legend>The layer, the device and the mesh</legend>'
            f"{inputs}</fieldset></form>"
            '<p class="a2-state" id="a2-state" role="status" aria-live="polite"></p>'
            '<svg class="a2-map" role="img" aria-labelledby="a2-state" viewBox="0 0 360 300"></svg>'
            f'<ul class="a2-key">{"".join(_key(*line) for line in KEY)}</ul>'
            f"{costs}{limits}{splits}</div>"
        )

    def __repr__(self) -> str:
        return f"Explorer({self.start})"


# Of the map's key: the SVG in a square of 16 units, and what it means.
KEY = (
    ('<rect class="free" width="16" height="16"/>', "computation binds, however the axes share"),
    ('<rect class="half" width="16" height="16"/>', "computation binds only if the axes overlap"),
    ('<rect class="bound" width="16" height="16"/>', "communication binds"),
    ('<path class="mine" d="M8 1l7 7l-7 7l-7-7z"/>', "your mesh"),
    ('<path class="same" d="M0 8h16"/>', "as many devices, split otherwise"),
    ('<circle class="point" cx="8" cy="8" r="5"/>', "the most devices, axes one after the other"),
    ('<rect class="point" x="3" y="3" width="10" height="10"/>',
     "the most devices, axes at the same time"),
)  # fmt: skip


def palette() -> str:
    """The drawings' colours as variables of the form, by the page's theme."""
    light = ";".join(f"--{name}:{value}" for name, value, _ in svg.PAIRS.values())
    dark = ";".join(f"--{name}:{value}" for name, _, value in svg.PAIRS.values())
    return f'.a2-explorer{{{light}}}html[data-theme="dark"] .a2-explorer{{{dark}}}'


def _input(field: Field, start: float) -> str:
    name = f"a2-{field.name}"
    keys = "numeric" if field.whole else "decimal"
    return (
        f'<div class="a2-field"><label for="{name}">{field.label} '
        f'<span class="a2-unit">{field.unit}</span></label>'
        f'<input id="{name}" name="{field.name}" inputmode="{keys}" value="{start:.15g}" '
        f'data-whole="{int(field.whole)}" data-least="{field.least:g}" data-most="{field.most}" '
        f'data-scale="{field.scale:.0f}" aria-describedby="{name}-error">'
        f'<p class="a2-error" id="{name}-error" aria-live="polite"></p></div>'
    )


def _table(caption, corner, heads, name, lines, columns) -> str:
    """A table of empty cells that the script finds by `data-out`: name.line.column."""
    head = "".join(f'<th scope="col">{text}</th>' for text in (corner, *heads))
    body = "".join(
        f'<tr><th scope="row">{text}</th>'
        + "".join(f'<td data-out="{name}.{line}.{column}"></td>' for column in columns)
        + "</tr>"
        for line, text in lines.items()
    )
    return (
        f'<table class="table a2-answers"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _key(drawing: str, words: str) -> str:
    return f'<li><svg viewBox="0 0 16 16" aria-hidden="true">{drawing}</svg>{words}</li>'
