"""The model of 220 billion parameters: the least devices that hold it."""

import numpy as np

from a2lib.report import style
from a2lib.report.plots import label
from a2lib.report.style import chart
from a2lib.theory.accounting import XXL


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
