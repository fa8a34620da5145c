"""Pipelines, experts and contexts: conditions with numbers, on two kinds of links."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.tables import Table
from a2lib.theory import other_axes
from a2lib.theory.parallelism import EXAMPLE, Layer

# Bytes a second that a GPU sends: over NVLink (the example's), and over a network of 400 Gbit/s.
NETWORK = 50e9
EXPERTS, TOP_K, GROUP = 64, 8, 8
NBSP = "\N{NO-BREAK SPACE}"


def numbers(layer: Layer = EXAMPLE) -> dict[str, str]:
    """What the prose says, by name."""
    return {
        "network": f"{NETWORK / 1e9:g}{NBSP}GB/s",
        "links": f"{layer.bandwidth / 1e9:g}{NBSP}GB/s",
        "ring_tokens": f"{_ring(layer, layer.bandwidth):,}",
        "ring_tokens_network": f"{_ring(layer, NETWORK):,}",
        "expert_width": f"{_width(layer, layer.bandwidth):,}",
        "expert_width_network": f"{_width(layer, NETWORK):,}",
        "experts": str(EXPERTS),
        "top_k": str(TOP_K),
        "expert_ratio": f"{EXPERTS / TOP_K:g}",
        "m_1f1b": str(other_axes.microbatches_for("1f1b", 8, 0.05)),
        "m_interleaved": str(other_axes.microbatches_for("interleaved", 8, 0.05, 4)),
    }


def _ring(layer: Layer, bandwidth: float) -> int:
    d = layer.d_model
    return math.ceil(other_axes.least_ring_tokens(d, d, layer.flops, bandwidth, causal=True))


def _width(layer: Layer, bandwidth: float) -> int:
    return math.ceil(other_axes.least_expert_width(GROUP, layer.flops, bandwidth))


def bubbles(caption: str, label: str) -> Table:
    """Bubble and peak by stages, micro-batches and kind."""
    lines = []
    for stages in (4, 8, 16):
        for m in (stages, 4 * stages, 16 * stages):
            cells = [stages, m]
            for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 4)):
                share = other_axes.bubble_share(kind, stages, m, chunks)
                held = other_axes.peak_microbatches(kind, stages, m, chunks)
                cells.append(f"{100 * share:.0f} %, {held:g}")
            lines.append(cells)
    columns = ["stages p", "micro-batches m", "GPipe", "1F1B", "interleaved, v = 4"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=0, keys=2)


def conditions(caption: str, label: str, layer: Layer = EXAMPLE) -> Table:
    """When each axis hides its communication, over NVLink and over a network."""
    C, d, f = layer.flops, layer.d_model, layer.d_ff
    each = {
        "pipeline: layers in a piece, at least": lambda w: style.digits(
            other_axes.least_stage_layers(f, C, w), 2
        ),
        f"experts over {GROUP}: their d_ff, at least": lambda w: f"{_width(layer, w):,}",
        f"FSDP of {EXPERTS} experts, top {TOP_K}: tokens a device, at least": lambda w: (
            f"{math.ceil(other_axes.least_tokens_with_experts(C, w, EXPERTS, TOP_K)):,}"
        ),
        "FSDP without experts: tokens a device, at least": lambda w: f"{math.ceil(C / w):,}",
        "context, ring, causal: tokens a device, at least": lambda w: f"{_ring(layer, w):,}",
        "the same with a quarter of the key heads": lambda w: (
            f"{math.ceil(other_axes.least_ring_tokens(d, d / 4, C, w, causal=True)):,}"
        ),
    }
    lines = [[name, of(layer.bandwidth), of(NETWORK)] for name, of in each.items()]
    columns = ["axis, and what must hold",
               *(f"at {w / 1e9:g} GB/s" for w in (layer.bandwidth, NETWORK))]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)
