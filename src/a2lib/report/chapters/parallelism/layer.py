"""One layer on N devices, with numbers: costs, limits, the best split, and the map of both axes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report import style
from a2lib.report.style import Chart
from a2lib.report.tables import Table
from a2lib.theory import collectives, parallelism
from a2lib.theory.parallelism import EXAMPLE, Layer

N = 8  # devices of the tables
FEW = 4096  # tokens at which what is small in the formulas counts
BOUND, FREE, HALF = "#fbe9da", "#b5d2f0", "#dce9f7"
NBSP = "\N{NO-BREAK SPACE}"


def numbers(layer: Layer = EXAMPLE) -> dict[str, str]:
    """What the prose says of the example, by name."""
    n_fsdp, n_tp = parallelism.shared_mesh_split(layer)
    shared = parallelism.brute_force(layer, shared=True)
    overlap = parallelism.brute_force(layer, shared=False)
    ring = collectives.all_reduce_s(layer.weight_bytes, N, layer.bandwidth)
    other = collectives.alternate_all_reduce_s(layer.weight_bytes, N, layer.bandwidth)
    few = with_tokens(FEW, layer)
    a, b = parallelism.data_slope(few), parallelism.tensor_slope(few)
    return {
        "few": f"{FEW:,}",
        "few_fsdp": f"{1 + a:.2f}",
        "few_fsdp_large": f"{a:.2f}",
        "few_shared": f"{parallelism.shared_mesh_limit(few):.2f}",
        "few_shared_large": f"{a * b / 4:.2f}",
        "tokens": f"{layer.tokens:,}",
        "d_model": f"{layer.d_model:,}",
        "d_ff": f"{layer.d_ff:,}",
        "rate": f"{layer.flops / 1e12:g}{NBSP}TFLOP/s",
        "links": f"{layer.bandwidth / 1e9:g}{NBSP}GB/s",
        "alpha": f"{layer.flops / layer.bandwidth:,.0f}",
        "a": f"{parallelism.data_slope(layer):.1f}",
        "b": f"{parallelism.tensor_slope(layer):.2f}",
        "data_limit": f"{math.floor(parallelism.data_limit(layer))}",
        "tensor_forward": f"{math.floor(parallelism.tensor_limit(layer))}",
        "tensor_backward": f"{math.floor(parallelism.tensor_limit(layer, 'backward'))}",
        "mesh_limit": f"{parallelism.mesh_limit(layer):.0f}",
        "shared_limit": f"{parallelism.shared_mesh_limit(layer):.1f}",
        "shared_fsdp": f"{n_fsdp:.1f}",
        "shared_tp": f"{n_tp:.1f}",
        "brute_shared": f"{shared[0]} × {shared[1]} = {math.prod(shared)}",
        "brute_overlap": f"{overlap[0]} × {overlap[1]} = {math.prod(overlap)}",
        "ring_ms": f"{style.digits(1e3 * ring)}{NBSP}ms",
        "other_ms": f"{style.digits(1e3 * other)}{NBSP}ms",
        "other_ratio": f"{other / ring:g}",
        "lost": f"{parallelism.mesh_limit(layer) / parallelism.shared_mesh_limit(layer):.1f}",
    }


def costs(caption: str, label: str, layer: Layer = EXAMPLE, n: int = N) -> Table:
    """Operations, seconds of both, and the largest N, by scheme and pass, on ``n`` devices."""
    schemes = {
        "data parallel": (parallelism.data_parallel, lambda _: parallelism.data_limit(layer)),
        "FSDP": (parallelism.fully_sharded, lambda _: parallelism.data_limit(layer)),
        "tensor parallel": (
            parallelism.tensor_parallel,
            lambda pass_: parallelism.tensor_limit(layer, pass_),
        ),
    }
    lines = []
    for name, (scheme, limit) in schemes.items():
        for pass_, cost in scheme(layer, n).items():
            seconds = cost.data_s + cost.tensor_s
            largest = f"{math.floor(limit(pass_))}" if seconds else "any"
            lines.append([
                name, pass_, f"{cost.flops / 1e12:.2f}", style.digits(1e3 * cost.compute_s),
                style.digits(1e3 * seconds), largest,
            ])  # fmt: skip
    columns = ["scheme", "pass", "TFLOP a device", "compute (ms)", "communication (ms)",
               "largest N"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def splits(caption: str, label: str, layer: Layer = EXAMPLE) -> Table:
    """For some N: the best split by formula, the best by trying whole numbers, and their shares."""
    lines = []
    for n in (8, 16, 32, 64, 128, 256):
        for shared in (False, True):
            fsdp, tp = parallelism.best_split(layer, n, shared)
            share = parallelism.communication_share(layer, fsdp, tp, shared)
            whole = parallelism.best_whole_split(layer, n, shared)
            found = parallelism.communication_share(layer, *whole, shared)
            lines.append([
                n, "one after the other" if shared else "at the same time",
                f"{fsdp:.1f} × {tp:.1f}", f"{share:.2f}", f"{whole[0]} × {whole[1]}",
                f"{found:.2f}" if found <= 1 else f"**{found:.2f}**",
            ])  # fmt: skip
    columns = ["N", "the axes communicate", "best N_FSDP × N_TP", "communication / compute",
               "in whole numbers", "then"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=0, keys=2)


def mesh_map(layer: Layer = EXAMPLE) -> Chart:
    """Where the forward is bound by what, over N_FSDP and N_TP: both axes logarithmic."""
    a, b = float(parallelism.data_slope(layer)), float(parallelism.tensor_slope(layer))
    right, top = 4 * (1 + a), 4 * (1 + b)

    def draw(figure):
        ax = figure.add_subplot()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xlim(1, right)
        ax.set_ylim(1, top)
        ax.set_facecolor(BOUND)
        ax.grid(False)
        x = np.geomspace(1, 1 + a, 200)
        ax.fill_between([1, 1 + a], 1, 1 + b, color=HALF, linewidth=0)
        ax.fill_between(x, 1, np.maximum(1 + b * (1 - (x - 1) / a), 1), color=FREE, linewidth=0)
        wide = np.geomspace(1, right, 60)
        for n in (8, 32, 128, 512):
            ax.plot(wide, n / wide, color=style.DIM, linewidth=0.8, linestyle=":")
            height = 3 if n < 1 + b else 2.4 * (1 + b)
            ax.annotate(f"N = {n}", (n / height, height), xytext=(3, 3), color=style.DIM,
                        textcoords="offset points")  # fmt: skip
        split = parallelism.shared_mesh_split(layer)
        for point, marker in ((split, "o"), ((1 + a, 1 + b), "s")):
            ax.plot(*point, marker=marker, color=style.COLOURS[0], markersize=8,
                    linestyle="", zorder=5)  # fmt: skip
            ax.annotate(f"N = {point[0] * point[1]:.0f}", point, xytext=(7, 5),
                        textcoords="offset points", fontweight="bold")  # fmt: skip
        ax.text(1.15, 1.1, "compute bound\nhowever the axes share", va="bottom")
        ax.text(1 + a, 1.12, "only if they\noverlap ", va="bottom", ha="right")
        ax.text(1.06 * (1 + a), 1.4, "bound by\nFSDP", va="bottom")
        ax.text(2, 1.35 * (1 + b), "bound by tensor parallelism", va="bottom")
        ax.set_xlabel("N_FSDP")
        ax.set_ylabel("N_TP")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")

    return Chart(draw, height=4.2)


def with_tokens(tokens: int, layer: Layer = EXAMPLE) -> Layer:
    """The same layer with another batch."""
    return replace(layer, tokens=tokens)


def by_tokens(caption: str, label: str, layer: Layer = EXAMPLE) -> Table:
    """How the limits move with the batch: only FSDP's and what is built of it do."""
    lines = []
    for tokens in (4096, 16384, 65536, 262144, 1048576):
        one = with_tokens(tokens, layer)
        fsdp, tp = parallelism.shared_mesh_split(one)
        lines.append([
            style.tokens(tokens), f"{math.floor(parallelism.data_limit(one)):,}",
            f"{math.floor(parallelism.tensor_limit(one)):,}",
            f"{math.floor(parallelism.mesh_limit(one)):,}",
            f"{math.floor(parallelism.shared_mesh_limit(one)):,}", f"{fsdp:.1f} × {tp:.1f}",
        ])  # fmt: skip
    columns = ["tokens", "FSDP alone", "TP alone, forward", "both, overlapping",
               "both, sharing links", "at N_FSDP × N_TP"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=0)
