"""Communication accounting: a block's forward by the tokens that a device works on."""

import numpy as np

from a2lib.report.plots import label, reference
from a2lib.report.style import DIM, chart
from a2lib.theory.accounting import XXL, Mesh

COMPUTES, GATHERS, SUMS, EXPOSED = "#0072b2", "#00825f", "#b0558a", "#f6cfab"


@chart(height=3.2)
def forward(figure, mesh: Mesh):
    """Draw the ms of a block's forward by the tokens per device: computation, the communication of
    FSDP and of tensor parallelism, shaded the gathers that nothing hides, and dotted all of it if
    half of the shorter part hides."""
    tokens = np.linspace(0, 640, 200)
    seconds = mesh.seconds(XXL, tokens)
    compute, sums = 1e3 * seconds["compute"], 1e3 * seconds["tp"]
    gathers = np.full(len(tokens), 1e3 * seconds["fsdp"])
    ax = figure.subplots()
    ax.fill_between(tokens, compute, gathers, where=gathers > compute, color=EXPOSED, linewidth=0)
    for values, colour in ((compute, COMPUTES), (gathers, GATHERS), (sums, SUMS)):
        ax.plot(tokens, values, color=colour, linewidth=1.8)
    sent = np.maximum(gathers, sums)  # both at the same time
    half_hidden = np.maximum(compute, sent) + np.minimum(compute, sent) / 2
    ax.plot(tokens, half_hidden, color=COMPUTES, linewidth=1.8, linestyle=":")
    label(ax, "if half hides", (300, 4.0), (0, 0), color=COMPUTES, ha="right")
    reference(ax, mesh.least_tokens(), f"{mesh.least_tokens():.1f} tokens", vertical=True)
    label(ax, "computation", (480, 3.65), (8, -10), color=COMPUTES)
    label(ax, "FSDP's all-gathers", (640, gathers[-1]), (-2, -14), color=GATHERS, ha="right")
    label(ax, "tensor parallelism", (640, sums[-1]), (-2, 8), color=SUMS, ha="right")
    label(ax, "gathers that\nnothing hides", (8, gathers[0]), (0, -34), color=DIM)
    ax.set(xlim=(0, 645), ylim=(0, 6.3), xlabel="tokens per device", ylabel="ms of a block")
