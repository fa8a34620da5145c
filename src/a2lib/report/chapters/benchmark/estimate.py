"""What a step must cost: the floor of its kernels, and the measured time beside it."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from a2lib.report import panels, style
from a2lib.report.chapters.benchmark.rows import (
    CONTEXT,
    MODELS,
    OURS,
    PLAIN,
    TITLES,
    Benchmark,
)
from a2lib.report.chapters.measured import time
from a2lib.report.metrics import pick
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown, Table
from a2lib.theory.products import busy_share
from a2lib.theory.roofline import (
    NARROW,
    Floor,
    eager_step,
    floor,
    fused_step,
    hidden_ms,
    idle_ms,
)
from a2lib.theory.transformer import SIZES

BATCH = 4
LARGEST = "2.7B"  # the largest size whose train-step the estimate is told of


def floors(b: Benchmark, model: str, precision: str, fused: bool, context: int = CONTEXT,
           by: str = "part") -> dict[str, Floor]:  # fmt: skip
    """The floor of each part and of the total; {} where the ceilings are not measured."""
    rate = b.tflops.get("bf16" if precision == NARROW else precision)
    if b.bandwidth is None or rate is None:
        return {}
    kernels = (fused_step if fused else eager_step)(SIZES[model], BATCH, context, precision)
    return floor(kernels, rate * 1e12, b.bandwidth * 1e12, by)


def idle(b: Benchmark, model: str, precision: str = "bf16") -> dict[str, float]:
    """What tiles that do not fill the GPU cost a fused step at least, by phase and in "total", in
    ms, beyond what they cost the product of the best rate; {} where the ceiling is not measured."""
    dtype = "bf16" if precision == NARROW else precision
    rate = b.tflops.get(dtype)
    if rate is None:
        return {}
    kernels = fused_step(SIZES[model], BATCH, CONTEXT, precision)
    timed = pick(b.ceiling_rows, operation="matmul", dtype=dtype, status="ok")
    size = int(timed.loc[(timed["size"].astype(float) ** 3 / timed["ms"]).idxmax(), "size"])
    multiprocessors = int(b.sheet("multiprocessors"))
    best = busy_share(size, size, multiprocessors)
    return idle_ms(kernels, rate * 1e12, multiprocessors, best)


def hidden(b: Benchmark, model: str, precision: str) -> float | None:
    """The floor, in ms, of the fused step whose optimizer runs beside its backward."""
    rate = b.tflops.get("bf16")
    if b.bandwidth is None or rate is None:
        return None
    kernels = fused_step(SIZES[model], BATCH, CONTEXT, precision)
    return hidden_ms(kernels, rate * 1e12, b.bandwidth * 1e12)


def table(b: Benchmark, caption: str, name: str) -> Table:
    """Operations, bytes, launches and floor of a plain step and of a fused one in bf16, each beside
    the GPU's measured time."""
    lines = []
    for model in MODELS:
        plain, fused = (floors(b, model, "fp32", False), floors(b, model, "bf16", True))
        if not (plain and fused):
            continue
        eager, least = plain["total"], fused["total"]
        measured = [b.ms(model, CONTEXT, "step", way=way, capture=True) for way in (PLAIN, OURS)]
        lines.append([
            TITLES[model], style.digits(eager.flops / 1e12), style.digits(eager.bytes / 1e9),
            f"{eager.launches:,}", time(eager.ms), time(measured[0]), _share(eager.ms, measured[0]),
            time(least.ms), time(measured[1]), _share(least.ms, measured[1]),
        ])  # fmt: skip
    columns = ["model", "TFLOP", "GB moved", "launches", "fp32: floor, ms", "measured", "share",
               "bf16, fused: floor, ms", "measured ", "share "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence(b: Benchmark) -> Markdown:
    """Which limit binds the largest step, from the floor alone."""
    plain, fused = floors(b, LARGEST, "fp32", False), floors(b, LARGEST, "bf16", True)
    if not (plain and fused):
        return Markdown(b.not_yet("the ceilings that an estimate needs"))
    total, products, whole = plain["total"].ms, plain["products"].ms, plain["total"]
    return Markdown(
        f"A plain train-step of {TITLES[LARGEST]} at {CONTEXT} tokens has "
        f"{style.digits(whole.flops / 1e12)} TFLOP of products and moves "
        f"{style.digits(whole.bytes / 1e9)} GB. At the "
        f"measured ceilings ({style.digits(b.tflops['fp32'])} TFLOP/s in fp32, "
        f"{style.digits(b.bandwidth)} TB/s) its kernels need at least {style.digits(total)} ms, "
        f"{products / total:.0%} of it in matrix products: {_binding(products / total)}. "
        f"The same step in bf16, with everything between two products fused, needs at least "
        f"{style.digits(fused['total'].ms)} ms, of which products take "
        f"{fused['products'].ms / fused['total'].ms:.0%} and the optimizer "
        f"{fused['optimizer'].ms / fused['total'].ms:.0%}."
    )


def chart(b: Benchmark) -> Chart:
    """The train-step of each model, plain and fast, beside its floor, in ms on a log scale.

    A hairline leads from the floor to the measured step, whose thick bar is p20 to p80; the hollow
    mark is the fast step launched kernel by kernel. A model that does not fit has its floors alone.
    """
    models = [m for m in MODELS if floors(b, m, "fp32", False) and floors(b, m, "bf16", True)]
    if not models:
        return panels.empty()
    plain, ours = style.COLOURS[1], style.COLOURS[0]
    ways = (("plain fp32", plain, "o", 0.2, PLAIN, False, "fp32", False),
            ("bf16, ours, captured", ours, "^", -0.2, OURS, True, "bf16", True))  # fmt: skip

    def words(ax, ms, x, y, side):
        ax.annotate(style.digits(ms), (x, y), xytext=(7 if side == "left" else -7, 0), ha=side,
                    va="center", textcoords="offset points")  # fmt: skip

    def draw(figure):
        ax = figure.subplots()
        for y, model in enumerate(reversed(models)):
            for _, colour, marker, up, way, capture, precision, fused in ways:
                least = floors(b, model, precision, fused)["total"].ms
                ax.plot(least, y + up, marker="|", markersize=9, markeredgewidth=2, color=colour)
                row = b.row(model, CONTEXT, way=way, capture=capture)
                if row is None or row.status != "ok":
                    ax.annotate("does not fit" if row is not None else "", (least, y + up),
                                xytext=(7, 0), textcoords="offset points", va="center",
                                color=style.DIM)  # fmt: skip
                    continue
                ax.plot([least, row.ms], [y + up] * 2, color=colour, linewidth=0.8)
                ax.plot([row.ms_p20, row.ms_p80], [y + up] * 2, color=colour, linewidth=3)
                ax.plot(row.ms, y + up, marker=marker, markersize=6.5, color=colour)
                right = row.ms
                if capture:
                    words(ax, row.ms, least, y + up, "right")
                    right = b.ms(model, CONTEXT, way=way)
                if right and capture:
                    ax.plot(right, y + up, marker=marker, markersize=6.5, color=colour,
                            markerfacecolor=style.PAPER)  # fmt: skip
                if right:
                    words(ax, right, right, y + up, "left")
        ax.set_yticks(range(len(models)), [TITLES[m] for m in reversed(models)])
        ax.set_ylim(-0.6, len(models) - 0.4)
        ax.set_xscale("log")
        ax.margins(x=0.2)
        ax.set_xlabel("train-step (ms)")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.plain(value)))
        ax.minorticks_off()
        ax.grid(False, axis="y")
        marks = [Line2D([], [], color=colour, marker=marker, linestyle="", label=title)
                 for title, colour, marker, *_ in ways]  # fmt: skip
        marks.append(Line2D([], [], color=ours, marker="^", linestyle="",
                            markerfacecolor=style.PAPER, label="the same, launched"))  # fmt: skip
        marks.append(Line2D([], [], color=style.INK, marker="|", markeredgewidth=2, linestyle="",
                            label="floor"))  # fmt: skip
        panels.legend(figure, marks, columns=2)

    return Chart(draw, height=1.0 + 0.52 * len(models) + panels.legend_height(4, 2))


def beside(b: Benchmark) -> Markdown:
    """Whether the measured GPU time is above the floor, as it must be."""
    found = []
    for model in MODELS:
        plain = floors(b, model, "fp32", False)
        measured = b.ms(model, CONTEXT, "step", capture=True)
        if plain and measured:
            found.append((model, plain["total"].ms, measured))
    if not found:
        return Markdown(b.not_yet("the GPU's time beside this floor"))
    below = [TITLES[m] for m, least, ms in found if ms < least]
    if below:
        names = ", ".join(below)
        return Markdown(f"Below its floor, so that the floor or the time is wrong: {names}.")
    shares = [least / ms for _, least, ms in found]
    return Markdown(
        f"The floor is {style.between(shares, '{:.0%}'.format)} of the GPU's measured time of a "
        "plain step; what is left is in the kernels, since a replay has no gaps of the host."
    )


def _binding(share: float) -> str:
    if share > 0.5:
        return "the arithmetic binds, not the memory"
    return "what lies between the products binds, not the arithmetic"


def _share(least: float, measured: float | None) -> str:
    return "·" if not measured else f"{least / measured:.0%}"
