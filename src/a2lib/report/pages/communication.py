"""The model of 220 billion parameters: other readings of the question, and two figures."""

from dataclasses import replace

import numpy as np

from a2lib.report import style
from a2lib.report.plots import label, reference
from a2lib.report.style import chart
from a2lib.theory import accounting
from a2lib.theory.accounting import XXL, Mesh

MORE = {  # other conventions that one may follow
    "W_ici counts one direction: half of the bandwidth": Mesh(W_ici=Mesh().W_ici / 2),
    "M_X not counted as bandwidth": Mesh(M_X=1),
    "both, and summed, rings exact": Mesh(M_X=1, W_ici=Mesh().W_ici / 2, combine="sum", ring=True),
}
OURS, OTHERS = "#d55e00", "#808080"


@chart(height=3.6)
def sensitivity(figure):
    """Draw the least batch per device against Y at 64 devices: the page's reading, and in grey the
    other ones."""
    axis = np.geomspace(1, 20.6, 150)
    ax = figure.add_subplot()
    for name, mesh in accounting.readings().items():
        x, y = [], []
        for tensor in axis:
            least = replace(mesh, X=64 / tensor, Y=tensor).least_tokens()
            if least is not None and least < 1500:
                x.append(tensor)
                y.append(least)
        dashes = "--" if "exact" in name else "-"
        if mesh == Mesh():
            ax.plot(x, y, color=OURS, linewidth=2.2, zorder=3, linestyle=dashes)
        else:
            ax.plot(x, y, color=OTHERS, linewidth=1.2, linestyle=dashes)
    least = Mesh().least_tokens()
    ax.plot(4, least, "o", color=OURS, markersize=7, zorder=4)
    label(ax, f"{least:.1f}", (4, least), (-8, -14), fontweight="bold", ha="right")
    ax.annotate("axes at the\nsame time", (1.15, 190), color=OURS)
    ax.annotate("axes one after\nthe other", (6.6, 430), color=style.DIM)
    ax.annotate("dashed: exact rings", (4.6, 1150), color=style.DIM)
    reference(ax, 4, "as asked: Y = 4", vertical=True)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(1, 26), ylim=(48, 1600))
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.set_yticks([64, 128, 256, 512, 1024], ["64", "128", "256", "512", "1024"])
    ax.set(xlabel="Y, tensor-parallel devices (X = 64 / Y)", ylabel="least tokens per device")


@chart(height=2.6)
def devices(figure):
    """Draw the least number of devices of 95 GB against the tokens whose activations they hold."""
    most = XXL.most_tokens()
    tokens = np.linspace(0, 0.97 * most, 300).round().astype(int)
    ax = figure.add_subplot()
    ax.plot(tokens, [XXL.least_devices(int(t)) for t in tokens], color=style.COLOURS[0])
    ax.axvline(most, color=style.DIM, linewidth=1, linestyle="--")
    line = {"arrowstyle": "-", "color": style.DIM, "linewidth": 0.8}
    words = f"more than {most:,} tokens:\nno number is enough"
    ax.annotate(words, (most, 560), (4300, 500), color=style.DIM, arrowprops=line)
    none = XXL.least_devices(0)
    ax.plot(0, none, "o", color=style.COLOURS[0], clip_on=False)
    label(ax, f"{none}", (0, none), (4, 8), fontweight="bold")
    ax.set(xlim=(0, 11_400), ylim=(0, 680), xlabel="tokens whose activations are held")
    ax.set_ylabel("least devices of 95 GB")
    ax.set_xticks([0, 2500, 5000, 7500, 10_000], ["0", "2,500", "5,000", "7,500", "10,000"])
