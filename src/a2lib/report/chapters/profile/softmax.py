"""The softmax beside the two products around it: time, operations, bytes, and the floor of each."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.ticker import NullLocator

from a2lib.report import panels, style
from a2lib.report.chapters.profile.drawing import KINDS, legend
from a2lib.report.chapters.profile.rows import (
    AUTOCAST,
    BATCH,
    CONTEXT,
    CONTEXTS,
    PLAIN,
    Profile,
    title,
)
from a2lib.report.metrics import pick
from a2lib.report.style import DIM, INK, Chart
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.products import matmul_flops
from a2lib.theory.transformer import SIZES

PART = "attn.attention."
WIDE = 4  # bytes of a float32
BYTES = {"fp32": WIDE, "bf16": 2}  # of what a product reads and writes
# Compare, subtract, exponential, add, divide.
PER_SCORE = 5


@dataclass(frozen=True)
class Softmax:
    """Of one forward, all blocks: milliseconds of the softmax, of the products before it
    (``scores``) and after (``values``), of scaling and masking, and of the ``casts`` that a softmax
    in float32 needs; ``times`` is the softmax over both products, ``flops`` how many times its
    operations they have."""

    softmax: float
    scores: float
    values: float
    masking: float
    flops: float
    casts: float = 0.0

    @property
    def times(self) -> float:
        return self.softmax / (self.scores + self.values)


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of one forward, all blocks, every operand passing once."""

    flops: int
    bytes: int

    def floor_ms(self, flops_per_s: float, bytes_per_s: float) -> tuple[float, float]:
        """The least time by the operations, and by the bytes."""
        return 1e3 * self.flops / flops_per_s, 1e3 * self.bytes / bytes_per_s


def costs(model: str, context: int, precision: str = "fp32") -> dict[str, Cost]:
    """What ``softmax``, and ``products`` (both), compute and move; the softmax is in float32."""
    shape = SIZES[model]
    heads = BATCH * shape.num_heads * shape.num_layers
    scores = heads * context**2
    rows = heads * context * shape.head_dim  # of q, k, v and the output
    flops = 2 * heads * matmul_flops(context, context, shape.head_dim)
    return {
        "softmax": Cost(PER_SCORE * scores, 2 * WIDE * scores),
        "products": Cost(flops, BYTES[precision] * (2 * scores + 4 * rows)),
    }


def compared(p: Profile, model: str, context: int, way: dict = PLAIN) -> Softmax | None:
    """What the trace has of it; None where its ranges do not tell the parts."""
    kernels = p.of(model, context, "forward", way)
    inside = {name: kernels[kernels["part"] == PART + name]
              for name in ("softmax", "scores", "values")}  # fmt: skip
    if not all(len(rows) for rows in inside.values()):
        return None
    products = [float(pick(inside[name], kind="matmul")["ms"].sum())
                for name in ("scores", "values")]  # fmt: skip
    if not all(products):
        return None
    cost = costs(model, context)
    casts = float(pick(inside["softmax"], kind="copy")["ms"].sum())
    return Softmax(
        float(inside["softmax"]["ms"].sum()) - casts,
        *products,
        float(inside["scores"]["ms"].sum()) - products[0],
        cost["products"].flops / cost["softmax"].flops,
        casts,
    )


def table(p: Profile, caption: str, name: str) -> Table:
    """Times, ratios and floors by model and context."""
    lines = []
    for model in p.models:
        for context, way in [*((c, PLAIN) for c in CONTEXTS), (CONTEXT, AUTOCAST)]:
            found = compared(p, model, context, way)
            if found is None:
                continue
            floors = _floors(p, model, context, way["precision"])
            narrow = f", {way['precision']}" if way != PLAIN else ""
            lines.append([
                title(model), style.tokens(context) + narrow,
                *(style.digits(v) for v in (found.scores, found.values, found.masking,
                                            found.softmax)),
                f"{found.times:.2f}", f"1/{found.flops:.0f}",
                *(MISSING if f is None else style.digits(max(f)) for f in floors),
            ])  # fmt: skip
    columns = ["model", "tokens", "scores, ms", "values, ms", "scale, mask, ms", "softmax, ms",
               "softmax / products: time", "operations", "floor of products, ms",
               "floor of softmax, ms"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def sentence(p: Profile) -> Markdown:
    """Which limit binds each, and what the times say."""
    told = []
    for model in p.models:
        context = next((c for c in reversed(CONTEXTS) if compared(p, model, c)), None)
        if context is None:
            continue
        found, cost = compared(p, model, context), costs(model, context)
        soft, prod = cost["softmax"], cost["products"]
        text = (
            f"{title(model)} at {style.tokens(context)} tokens: the two products have "
            f"{found.flops:.0f} times the operations of the softmax "
            f"({style.digits(prod.flops / 1e9)} to {style.digits(soft.flops / 1e9)} GFLOP a "
            f"forward) and move {prod.bytes / soft.bytes:.2f} times its bytes; they take "
            f"{1 / found.times:.2f} times as long ({style.digits(found.scores + found.values)} and "
            f"{style.digits(found.softmax)} ms)"
        )
        floors = _floors(p, model, context)
        if None not in floors:
            (of_flops, of_bytes), (soft_flops, soft_bytes) = floors
            text += (
                f". At the measured ceilings the products need {style.digits(of_flops)} ms for "
                f"their operations and {style.digits(of_bytes)} ms for their bytes, the softmax "
                f"{style.digits(soft_flops)} and {style.digits(soft_bytes)}: "
                f"{_binding(of_flops, of_bytes)} the products, "
                f"{_binding(soft_flops, soft_bytes)} the softmax, which reaches "
                f"{soft_bytes / found.softmax:.0%} of the bandwidth"
            )
        told.append(f"- {text}.")
    if not told:
        return Markdown(p.not_yet("the softmax beside the products"))
    return Markdown("\n".join(told))


def chart(p: Profile) -> Chart:
    """Products and softmax of each model at its longest context: their share of the operations of
    both, and of the time of both."""
    found = []
    for model in p.models:
        context = next((c for c in reversed(CONTEXTS) if compared(p, model, c)), None)
        if context is not None:
            found.append((model, context, compared(p, model, context)))
    if not found:
        return panels.empty()

    def draw(figure):
        ax, y, ticks = figure.subplots(), 0, []
        for model, context, one in reversed(found):
            of_time = 100 * one.times / (1 + one.times)
            of_flops = 100 / (1 + one.flops)
            for words, part in (("time", of_time), ("operations", of_flops)):
                ax.barh(y, 100 - part, height=0.66, color=KINDS["matmul"], linewidth=0)
                ax.barh(y, part, left=100 - part, height=0.66, color=KINDS["softmax"], linewidth=0)
                ax.annotate(f"{part:.2g} %", (100, y), xytext=(4, 0), textcoords="offset points",
                            va="center")  # fmt: skip
                ticks.append((y, f"{title(model)} {style.tokens(context)}: {words}"))
                y += 1
            y += 0.4
        ax.set_yticks(*zip(*ticks, strict=True))
        ax.set_xlim(0, 116)
        ax.set_xticks(range(0, 101, 25))
        ax.grid(False)
        ax.set_xlabel("share (%)")
        legend(figure, {"both products": KINDS["matmul"], "softmax": KINDS["softmax"]})

    return Chart(draw, height=1.3 + 0.8 * len(found))


def _floors(p: Profile, model: str, context: int, precision: str = "fp32"):
    """(by operations, by bytes) in ms of the products and of the softmax; None without ceilings.
    The softmax's operations run where fp32 products do, on the same units."""
    if p.bandwidth is None or not {"fp32", precision} <= set(p.tflops):
        return None, None
    cost = costs(model, context, precision)
    return tuple(cost[name].floor_ms(p.tflops[dtype] * 1e12, p.bandwidth * 1e12)
                 for name, dtype in (("products", precision), ("softmax", "fp32")))  # fmt: skip


def narrow(p: Profile) -> Markdown:
    """The same with products in bf16, whose softmax stays in float32."""
    told = []
    for model in p.models:
        wide, found = (compared(p, model, CONTEXT, way) for way in (PLAIN, AUTOCAST))
        if wide is None or found is None:
            continue
        both = found.scores + found.values
        text = (
            f"in {title(model)} the products take {style.digits(both)} ms in place of "
            f"{style.digits(wide.scores + wide.values)}, the softmax {style.digits(found.softmax)} "
            f"in place of {style.digits(wide.softmax)}, {found.times:.2f} times as long as both"
        )
        if found.casts:
            text += f", and the cast to fp32 before it {style.digits(found.casts)}"
        products, softmax = _floors(p, model, CONTEXT, "bf16")
        if products is not None:
            text += (
                f" (floors: products {style.digits(products[0])} ms by operations and "
                f"{style.digits(products[1])} by bytes, softmax {style.digits(softmax[1])} by "
                "bytes)"
            )
        told.append((text, products is not None and products[1] > products[0]))
    if not told:
        return Markdown(p.not_yet("the softmax beside products in bf16"))
    memory = all(bound for _, bound in told)
    return Markdown(
        f"**With products in bf16**, {CONTEXT} tokens: {'; '.join(text for text, _ in told)}. "
        "Autocast keeps the softmax in fp32, which passes as many bytes as before, while the "
        "products have another ceiling and half the bytes"
        + (": memory now binds them too, and the ratio of times is one of bytes." if memory
           else ".")
    )  # fmt: skip


def roofline(p: Profile) -> Chart:
    """Operations a second over operations a byte, under the measured ceilings: the softmax and both
    products, a mark for each model, plain at its longest context, and hollow in bf16."""
    found = [(model, context, PLAIN) for model in p.models
             if (context := next((c for c in reversed(CONTEXTS) if compared(p, model, c)), None))]
    if not found or p.bandwidth is None or "fp32" not in p.tflops:
        return panels.empty()
    if "bf16" in p.tflops:
        found += [(model, CONTEXT, AUTOCAST) for model in p.models
                  if compared(p, model, CONTEXT, AUTOCAST)]  # fmt: skip
    ceilings = {way["precision"]: p.tflops[way["precision"]] for *_, way in found}
    slope, low, high = p.bandwidth, 0.2, 1000.0  # operations a byte
    marks = dict(zip(p.models, "osD^", strict=False))

    def draw(figure):
        ax = figure.subplots()
        top = max(ceilings.values())
        ax.plot([low, top / slope], [low * slope, top], color=INK, linewidth=1.4)
        ax.annotate(f"memory, {slope:.2f} TB/s", (10, 10 * slope), xytext=(-8, 0),
                    textcoords="offset points", ha="right", va="center")  # fmt: skip
        for precision, flat in ceilings.items():
            ax.plot([flat / slope, high], [flat, flat], color=INK, linewidth=1.4)
            ax.annotate(f"{precision}, {flat:.0f} TFLOP/s", (high, flat), xytext=(0, 4),
                        textcoords="offset points", ha="right", va="bottom")  # fmt: skip
        for model, context, way in found:
            one, plain = compared(p, model, context, way), way == PLAIN
            cost = costs(model, context, way["precision"])
            for name, kind, ms in (("softmax", "softmax", one.softmax),
                                   ("products", "matmul", one.scores + one.values)):
                at = cost[name].flops / cost[name].bytes, cost[name].flops / ms / 1e9
                ax.plot(*at, marks[model], color=KINDS[kind], markersize=8, zorder=3,
                        fillstyle="full" if plain else "none")  # fmt: skip
                words = "softmax" if name == "softmax" else "both products"
                if plain and model == found[0][0]:
                    ax.annotate(words, at, xytext=(10, -8), textcoords="offset points", va="top")
            words = f"{title(model)}, {style.tokens(context)} tokens" + ("" if plain else ", bf16")
            ax.plot([], [], marks[model], color=DIM, markersize=8, label=words,
                    fillstyle="full" if plain else "none")  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(low, high)
        ax.set_ylim(low * slope, 2.2 * top)
        for axis, ticks in ((ax.xaxis, (1, 10, 100, 1000)), (ax.yaxis, (1, 10, 100))):
            axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
            axis.set_minor_locator(NullLocator())
        ax.set_xlabel("operations a byte")
        ax.set_ylabel("TFLOP/s")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handletextpad=0.3)

    return Chart(draw, height=3.8)


def by_memory(p: Profile, model: str, context: int) -> bool:
    """Whether the measured ceilings say that memory binds the softmax and arithmetic the products.
    """
    products, softmax = _floors(p, model, context)
    return None not in (products, softmax) and (
        products[0] > products[1] and softmax[1] > softmax[0]
    )


def _binding(by_flops: float, by_bytes: float) -> str:
    return "arithmetic binds" if by_flops > by_bytes else "memory binds"
