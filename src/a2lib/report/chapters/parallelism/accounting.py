"""The model of 220 billion parameters: its memory, its batch under each reading, ways to less."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report import data, style
from a2lib.report.style import Chart
from a2lib.report.tables import Table
from a2lib.theory import accounting
from a2lib.theory.accounting import GB, GIB, H100_GB, NARROW, V5P_GB, XXL, Mesh

NBSP = "\N{NO-BREAK SPACE}"
BATCHES = (0, 1024, 2048, 4096, 8192, 10_240)


def both(n_bytes: float) -> str:
    """Bytes in GB of 1e9 and in GiB: 3,518 GB (3,276 GiB)."""
    return f"{_few(n_bytes / GB)}{NBSP}GB ({_few(n_bytes / GIB)}{NBSP}GiB)"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else style.digits(value)


def numbers() -> dict[str, str]:
    """What the prose says, by name."""
    mesh = Mesh()
    published = accounting.published_forward()
    seconds = mesh.seconds(XXL, mesh.least_tokens())
    return {
        "parameters": f"{XXL.parameters / 1e9:.2f} billion",
        "one": both(XXL.state["weights"]),
        "moments": both(XXL.state["optimizer"]),
        "state": both(XXL.state_bytes),
        "per_token": f"{XXL.saved_bytes_per_token / 1e6:.2f}{NBSP}MB "
        f"({XXL.saved_bytes_per_token / 2**20:.2f}{NBSP}MiB)",
        "h100": f"{math.ceil(XXL.state_bytes / (H100_GB * GB))}",
        "h100_exact": f"{XXL.state_bytes / (H100_GB * GB):.2f}",
        "h100_gib": f"{math.ceil(XXL.state_bytes / (H100_GB * GIB))}",
        "h100_tokens": f"{H100_GB * GB // XXL.saved_bytes_per_token:,}",
        "devices": f"{XXL.least_devices(0)}",
        "devices_exact": f"{XXL.state_bytes / (V5P_GB * GB):.2f}",
        "devices_gib": f"{XXL.least_devices(0, V5P_GB * GIB)}",
        "most_tokens": f"{XXL.most_tokens():,}",
        "devices_4096": f"{XXL.least_devices(4096)}",
        "gathered": both(XXL.gathered_bytes),
        "devices_gathered": f"{XXL.least_devices(0, V5P_GB * GB - 2 * XXL.gathered_bytes)}",
        "alpha": f"{mesh.alpha:,.0f}",
        "least": f"{math.ceil(mesh.least_tokens())}",
        "batch": f"{math.ceil(mesh.batch()):,}",
        "replica": f"{math.ceil(mesh.batch() / mesh.X):,}",
        "tp_share": f"{100 * seconds['tp'] / seconds['compute']:.0f}{NBSP}%",
        "most_tp": f"{XXL.d_ff * mesh.M_Y / mesh.alpha:.1f}",
        "least_sum": f"{math.ceil(Mesh(combine='sum').least_tokens())}",
        "least_ring": f"{math.ceil(Mesh(ring=True).least_tokens())}",
        "best": f"{math.ceil(mesh.best_tokens())}",
        "best_sum": f"{math.ceil(Mesh(combine='sum').best_tokens())}",
        "best_X": f"{math.sqrt(64 * mesh.best_tokens() / XXL.d_ff * 2 * 64):.1f}",
        "best_Y": f"{64 / math.sqrt(64 * mesh.best_tokens() / XXL.d_ff * 2 * 64):.1f}",
        "published": f"{published.replica:,.2f}",
        "published_overall": f"{published.overall:,.0f}",
        "published_device": f"{published.per_device:.0f}",
        "published_all": f"{published.overall_of_all_replicas:,.0f}",
        "published_axes": f"{math.ceil(published.per_device_with_axes)}",
        "published_axes_all": f"{math.ceil(64 * published.per_device_with_axes):,}",
        "published_saved": both(2 * 2 * XXL.parameters),
    }


def devices(caption: str, label: str) -> Table:
    """The least N_FSDP by batch: what stays whole on each device, and what is cut."""
    lines = []
    for tokens in BATCHES:
        n = XXL.least_devices(tokens)
        half = XXL.saved_bytes_per_token * tokens / 2
        gib = XXL.least_devices(tokens, V5P_GB * GIB)
        lines.append([
            style.tokens(tokens), f"{half / GB:.1f}", f"{n:,}",
            f"{math.floor(XXL.device_bytes(tokens, n) / (GB / 100)) / 100:.2f}", f"{gib:,}",
        ])  # fmt: skip
    most = XXL.most_tokens()
    lines.append([f"over {most:,}", f"over {most * XXL.saved_bytes_per_token / 2 / GB:.1f}", "none",
                  "–", "–"])  # fmt: skip
    columns = ["tokens", "whole on each (GB)", "N for 95 GB", "then a device has (GB)",
               "N for 95 GiB"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=0)


def readings(caption: str, label: str) -> Table:
    """The least batch under every reading, ours first, and what other conventions make of it."""
    rows = list(accounting.readings().items())
    base = Mesh()
    more = {
        "W_ici counts one direction: half the bandwidth": replace(base, W_ici=base.W_ici / 2),
        "M_X not counted as bandwidth": replace(base, M_X=1),
        "both, and summed, rings exact": Mesh(M_X=1, W_ici=base.W_ici / 2, combine="sum",
                                              ring=True),
    }  # fmt: skip
    lines = []
    for name, mesh in [*rows, *more.items()]:
        shown = f"**{name}** (ours)" if mesh == base else name
        lines.append([
            shown, f"{math.ceil(mesh.least_tokens()):,}",
            f"{math.ceil(mesh.batch() / mesh.X):,}", f"{math.ceil(mesh.batch()):,}",
            f"{100 * mesh.tp_share(XXL):.0f} %",
        ])  # fmt: skip
    columns = ["reading", "tokens per device", "per FSDP replica", "overall",
               "TP communication / compute"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def published(caption: str, label: str) -> Table:
    """What two writeups print, what their own arithmetic gives, and ours under the same reading."""
    found = accounting.published_forward()
    state = f"{XXL.state_bytes / GB:,.2f}"
    gpus = f"{math.ceil(XXL.state_bytes / (H100_GB * GB))}"
    activations = f"{XXL.saved_bytes_per_token / GB:.5f} T"
    known = {
        "state": (state, state),
        "H100s for the state": (gpus, gpus),
        "saved for the backward": (f"{2 * NARROW * XXL.parameters / GB:.2f}", activations),
        "saved per token": (f"{XXL.saved_bytes_per_token / GB:.5f}", activations),
        "N without activations": (f"{XXL.least_devices(0)}", f"{XXL.least_devices(0)}"),
        "per device": (f"{found.replica:.2f}", f"{math.ceil(found.per_device_with_axes):,}"),
        "overall": (f"{found.overall:.0f}", f"{math.ceil(64 * found.per_device_with_axes):,}"),
    }
    lines = [
        [f"({row.part}) {row.quantity} ({row.unit})", row.device.replace("an ", ""), row.printed,
         *known[row.quantity]]
        for row in data.load_reference("communication_accounting").itertuples()
    ]  # fmt: skip
    columns = ["quantity", "writeup of", "printed", "its arithmetic", "ours"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2)


def ways(caption: str, label: str) -> Table:
    """What lowers the batch, by how much, and its price."""
    lines = [
        [t.name, t.price, f"{math.ceil(t.tokens_per_device):,}", f"{math.ceil(t.overall):,}"]
        for t in accounting.tricks()
    ]
    columns = ["way", "price", "tokens per device", "overall"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2)


LOOKS = {
    "at the same time, rings as 1": ("#d55e00", "-", "max, ours"),
    "at the same time, rings exact": ("#d55e00", "--", "max, rings"),
    "one after the other, rings as 1": ("#0072b2", "-", "sum"),
    "one after the other, rings exact": ("#0072b2", "--", "sum, rings"),
}


def sensitivity() -> Chart:
    """The least batch per device against Y at 64 devices, under each reading."""
    axis = np.geomspace(1, 20.6, 150)

    def draw(figure):
        ax = figure.add_subplot()
        for name, mesh in accounting.readings().items():
            colour, dashes, words = LOOKS[name]
            points = [(y, replace(mesh, X=64 / y, Y=y).least_tokens()) for y in axis]
            xs, ys = zip(*((y, t) for y, t in points if t is not None and t < 1500), strict=True)
            ax.plot(xs, ys, color=colour, linestyle=dashes, label=words)
            ax.plot(mesh.Y, mesh.least_tokens(), "o", color=colour, markersize=5)
        ax.axvline(4, color=style.DIM, linewidth=0.8, linestyle=":")
        ax.annotate("the question: Y = 4", (4, 1150), xytext=(5, 0), textcoords="offset points",
                    color=style.DIM)  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xlim(1, 22)
        ax.set_ylim(48, 1600)
        ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        ax.set_yticks([64, 128, 256, 512, 1024], ["64", "128", "256", "512", "1024"])
        ax.set_xlabel("Y, devices of tensor parallelism (X = 64 / Y)")
        ax.set_ylabel("least tokens per device")
        ax.legend(frameon=False, loc="lower left")

    return Chart(draw, height=3.8)
