"""What Inductor joins between two products of a forward: kernels, bytes by count, time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.profile.rows import BATCH, COMPILED, CONTEXT, Profile, title
from a2lib.report.tables import Markdown, Table
from a2lib.theory.roofline import compiled_step, eager_step
from a2lib.theory.transformer import SIZES

# What a block does between its products: the parts whose ranges launch it, the names of its kernels
# in theory/roofline.py, and what the names of Inductor's have that hold it; the first one counts.
BETWEEN = {
    "scale, mask, softmax": (("attn.attention.scores", "attn.attention.softmax"),
                             r"times scale|indices|compare|mask|softmax", r"softmax"),
    "gate of the FFN": (("ffn",), r"silu|gate", r"silu"),
    "RoPE, copies of heads": (("attn", "attn.attention.values"), r"rope|copy [vo]",
                              r"flip|neg_stack|transpose"),
    "norms, residual": (("ln1", "ln2", "block"), r"norm|residual", r"rsqrt|add"),
}  # fmt: skip


@dataclass(frozen=True)
class Between:
    """What a forward does between its products, of all blocks: kernels, bytes by count, ms."""

    kernels: int
    bytes: int
    ms: float


def _between(p: Profile, model: str) -> dict[str, tuple[Between, Between]]:
    """What -> plain and compiled; {} where one of the two was not traced."""
    plain = p.of(model, CONTEXT, "forward")
    inductor = p.of(model, CONTEXT, "forward", COMPILED, ("forward",))
    inductor = inductor[inductor["kernel"].str.startswith("triton_")]
    if not len(plain) or not len(inductor):
        return {}
    which, found = inductor["kernel"].map(_what), {}
    for what, (parts, counted, _) in BETWEEN.items():
        eager = plain[plain["part"].isin(parts) & (plain["kind"] != "matmul")]
        pair = []
        for rows, step in ((eager, eager_step), (inductor[which == what], compiled_step)):
            moved = sum(
                k.count * (k.read + k.written)
                for k in step(SIZES[model], BATCH, CONTEXT, "fp32")
                if k.phase == "forward" and k.count >= SIZES[model].num_layers and not k.flops
                and re.search(counted, k.name)
            )  # fmt: skip
            pair.append(Between(int(rows["calls"].sum()), moved, float(rows["ms"].sum())))
        found[what] = tuple(pair)
    return found


def fused(p: Profile) -> Markdown:
    """How many kernels of a block Inductor joins into how many."""
    told = []
    for model in p.models:
        pairs = list(_between(p, model).values())
        if not pairs:
            continue
        layers = SIZES[model].num_layers
        kernels, moved, ms = (
            [sum(getattr(one[i], name) for one in pairs) for i in (0, 1)]
            for name in ("kernels", "bytes", "ms")
        )
        told.append(
            f"{title(model)} {kernels[0] / layers:.0f} kernels of a block become "
            f"{kernels[1] / layers:.0f}; of all blocks, {style.digits(moved[0] / 1e9)} GB by count "
            f"become {style.digits(moved[1] / 1e9)}, and {style.digits(ms[0])} ms become "
            f"{style.digits(ms[1])}"
        )
    if not told:
        return Markdown(p.not_yet("what Inductor fuses"))
    return Markdown(
        "Inductor joins what lies between two products into few kernels, and computes the mask "
        f"within the softmax's. In the forward of {'. In that of '.join(told)}."
    )


def between(p: Profile, caption: str, name: str) -> Table:
    """What a forward does between its products: kernels a block, gigabytes by count and
    milliseconds, plain and compiled."""
    lines = []
    for model in p.models:
        for what, pair in _between(p, model).items():
            cells = [cell for one in pair for cell in (
                f"{one.kernels / SIZES[model].num_layers:.2g}", style.digits(one.bytes / 1e9),
                style.digits(one.ms))]  # fmt: skip
            lines.append([title(model), what, *cells])
    columns = ["model", "between products", "plain: kernels a block", "GB", "ms",
               "compiled: kernels a block", "GB ", "ms "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _what(kernel: str) -> str:
    """Which of BETWEEN a kernel of Inductor's is, by the operations in its name; "" for none."""
    return next((what for what, (*_, names) in BETWEEN.items() if re.search(names, kernel)), "")
