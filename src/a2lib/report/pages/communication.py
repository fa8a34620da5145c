"""The model of 220 billion parameters: its batch under each reading, devices, published answers."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report import data, style
from a2lib.report.plots import label, reference
from a2lib.report.style import chart
from a2lib.theory import accounting
from a2lib.theory.accounting import GB, H100_GB, PUBLISHED, SUMMED, XXL, Mesh
from a2lib.theory.products import NARROW

MORE = {  # other conventions that one may follow
    "W_ici counts one direction: half of the bandwidth": Mesh(W_ici=Mesh().W_ici / 2),
    "M_X not counted as bandwidth": Mesh(M_X=1),
    "both, and summed, rings exact": Mesh(M_X=1, W_ici=Mesh().W_ici / 2, combine="sum", ring=True),
}


@chart(height=3.6)
def sensitivity(figure):
    """The least batch per device against Y at 64 devices: our reading, and the others in grey."""
    axis = np.geomspace(1, 20.6, 150)
    ax = figure.add_subplot()
    for name, mesh in accounting.readings().items():
        ours = mesh == Mesh()
        points = [(y, replace(mesh, X=64 / y, Y=y).least_tokens()) for y in axis]
        x, y = zip(*((y, t) for y, t in points if t is not None and t < 1500), strict=True)
        look = ("#d55e00", 2.2, 3) if ours else ("#808080", 1.2, 2)
        dashes = "--" if "exact" in name else "-"
        ax.plot(x, y, color=look[0], linewidth=look[1], zorder=look[2], linestyle=dashes)
    least = Mesh().least_tokens()
    ax.plot(4, least, "o", color="#d55e00", markersize=7, zorder=4)
    label(ax, f"{math.ceil(least)}", (4, least), (-8, -14), fontweight="bold", ha="right")
    ax.annotate("at the same\ntime: ours", (1.15, 190), color="#d55e00")
    ax.annotate("one after the other", (5.5, 560), color="#555555")
    reference(ax, 4, "the question", vertical=True)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(1, 26), ylim=(48, 1600))
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.set_yticks([64, 128, 256, 512, 1024], ["64", "128", "256", "512", "1024"])
    ax.set(xlabel="Y, tensor-parallel devices (X = 64 / Y)", ylabel="least tokens per device")


@chart(height=2.6)
def devices(figure):
    """The least number of devices of 95 GB against the tokens whose activations are held."""
    most = XXL.most_tokens()
    tokens = np.linspace(0, 0.97 * most, 300).round().astype(int)
    ax = figure.add_subplot()
    ax.plot(tokens, [XXL.least_devices(int(t)) for t in tokens], color=style.COLOURS[0])
    ax.axvline(most, color=style.DIM, linewidth=1, linestyle="--")
    label(ax, f"{most:,}: none", (most, 620), (-5, 0), ha="right", color=style.DIM)
    none = XXL.least_devices(0)
    ax.plot(0, none, "o", color=style.COLOURS[0], clip_on=False)
    label(ax, f"{none}", (0, none), (4, 8), fontweight="bold")
    ax.set(xlim=(0, 11_400), ylim=(0, 680), xlabel="tokens whose activations are held")
    ax.set_ylabel("least devices of 95 GB")
    ax.set_xticks([0, 2500, 5000, 7500, 10_000], ["0", "2,500", "5,000", "7,500", "10,000"])


def published() -> pd.DataFrame:
    """What two writeups print, what their own arithmetic gives, and ours under their reading."""
    theirs, least = PUBLISHED.Y * PUBLISHED.least_tokens(), SUMMED.least_tokens()
    state, gpus = f"{XXL.state_bytes / GB:,.2f}", f"{math.ceil(XXL.state_bytes / H100_GB / GB)}"
    per_token = f"{XXL.saved_bytes_per_token / GB:.5f}"
    ours = math.ceil(least), math.ceil(64 * least)
    known = {
        "state": (state, state),
        "H100s for the state": (gpus, gpus),
        "saved for the backward": (f"{2 * NARROW * XXL.parameters / GB:.2f}", f"{per_token} T"),
        "saved per token": (per_token, f"{per_token} T"),
        "N without activations": (f"{XXL.least_devices(0)}", f"{XXL.least_devices(0)}"),
        "per device": (f"{theirs:.2f}", f"{ours[0]:,}"),
        "overall": (f"{theirs * SUMMED.M_X * SUMMED.M_Y:.0f}", f"{ours[1]:,}"),
    }
    lines = [
        [f"({r.part}) {r.quantity} ({r.unit})", r.device.replace("an ", ""), r.printed]
        + [*known[r.quantity]]
        for r in data.load_reference("communication_accounting").itertuples()
    ]
    columns = ["quantity", "writeup of", "printed", "its arithmetic", "ours"]
    return pd.DataFrame(lines, columns=columns)
