"""What a step's kernels are by count, and what they must cost, beside the trace."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.profile.rows import (
    AUTOCAST,
    BATCH,
    CONTEXT,
    HEAD,
    LINEAR,
    PLAIN,
    Profile,
    title,
)
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.roofline import PHASES, eager_step, floor
from a2lib.theory.transformer import SIZES

NORMS = ("ln1", "ln2", "ln_final")


@dataclass(frozen=True)
class Phase:
    """One phase of an eager step: kernels by count and in the trace, and of the latter what
    libraries launch beside an operator's own kernel: ``split``, those that sum or continue a
    product, and ``cleared``, memsets of their workspaces. Then the floor of the products and of the
    rest in ms, None without ceilings, and what the trace has."""

    counted: int
    seen: int
    split: int
    cleared: int
    floors: tuple[float, float] | None
    measured: tuple[float, float]

    @property
    def unexplained(self) -> int:
        return self.seen - self.counted - self.split - self.cleared


def phases(p: Profile, model: str, context: int = CONTEXT, way: dict = PLAIN) -> dict[str, Phase]:
    """Each phase that the trace has; {} where there is none."""
    trace, found, precision = p.of(model, context, way=way), {}, way["precision"]
    step = eager_step(SIZES[model], BATCH, context, precision)
    for phase in PHASES:
        seen = pick(trace, phase=phase)
        if not len(seen):
            continue
        mine = [kernel for kernel in step if kernel.phase == phase]
        floors = None
        if p.bandwidth is not None and precision in p.tflops:
            ceilings = p.tflops[precision] * 1e12, p.bandwidth * 1e12
            floors = tuple(
                floor([k for k in mine if bool(k.flops) is product], *ceilings)["total"].ms
                for product in (True, False)
            )
        matmuls = pick(seen, kind="matmul")
        products = float(matmuls["ms"].sum())
        found[phase] = Phase(
            sum(kernel.count for kernel in mine),
            int(seen["calls"].sum()),
            max(0, int(matmuls["calls"].sum()) - sum(k.count for k in mine if k.flops)),
            _cleared(seen),
            floors,
            (products, float(seen["ms"].sum()) - products),
        )
    return found


def _cleared(kernels: pd.DataFrame) -> int:
    """How many memsets there are: by their name, or, where they take too little to be listed, by
    where they are: a linear layer copies nothing, nor does a norm by a kernel of its own."""
    copies = pick(kernels, kind="copy")
    unnamed = (copies["kernel"] == "rest") & copies["part"].isin([*LINEAR, HEAD, *NORMS])
    return int(copies.loc[copies["kernel"].str.startswith("Memset") | unnamed, "calls"].sum())


def table(p: Profile, caption: str, name: str) -> Table:
    """Kernels and milliseconds of each phase, by count and floor, and in the trace."""
    lines = []
    for model in p.models:
        for phase, one in phases(p, model).items():
            floors = one.floors or (None, None)
            cells = []
            for least, ms in zip(floors, one.measured, strict=True):
                cells += [MISSING if least is None else style.digits(least), style.digits(ms)]
            lines.append([title(model), phase, f"{one.counted:,}", f"{one.seen:,}",
                          f"{one.split:,}", f"{one.cleared:,}", *cells])  # fmt: skip
    columns = ["model", "phase", "kernels: by count", "in the trace", "of split products",
               "memsets", "products: floor, ms",
               "measured", "the rest: floor, ms", "measured "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def sentence(p: Profile) -> Markdown:
    """Whether the kernels are those of the count, and how near products and the rest come to their
    floors."""
    told = []
    for model in p.models:
        found = phases(p, model)
        if not found:
            continue
        off = [f"{phase} {one.seen:,} for {one.counted:,}"
               for phase, one in found.items() if one.unexplained]  # fmt: skip
        split, cleared = (sum(getattr(one, name) for one in found.values())
                          for name in ("split", "cleared"))  # fmt: skip
        beside = [
            words for n, words in ((split, f"{split:,} that sum or continue a split product"),
                                   (cleared, f"{cleared:,} memsets of workspaces")) if n
        ]  # fmt: skip
        text = f"The trace of {title(model)} has " + (
            f"other numbers of kernels than the count ({', '.join(off)})" if off
            else "exactly the kernels of the count in every phase"
            + (f", and beside them {listed(beside)}, which libraries launch for themselves"
               if beside else "")
        )  # fmt: skip
        if all(one.floors for one in found.values()):
            least = [sum(one.floors[i] for one in found.values()) for i in (0, 1)]
            took = [sum(one.measured[i] for one in found.values()) for i in (0, 1)]
            shares = [f"{a / b:.0%}" if b else MISSING for a, b in zip(least, took, strict=True)]
            text += (
                f"; products run at {shares[0]} of the ceiling that their floor assumes, the rest "
                f"at {shares[1]}"
            )
        told.append(text)
    if not told:
        return Markdown(p.not_yet("the kernels beside their count"))
    return Markdown(f"{'. '.join(told)}.{_narrow(p)}")


def _narrow(p: Profile) -> str:
    """Whether the count holds with the casts of bf16, too."""
    found = {title(model): phases(p, model, way=AUTOCAST) for model in p.models}
    found = {name: parts for name, parts in found.items() if parts}
    if not found:
        return ""
    off = [name for name, parts in found.items()
           if any(one.unexplained for one in parts.values())]  # fmt: skip
    if off:
        return f" In bf16 the numbers of {listed(off)} differ from the count."
    more = [f"{sum(one.counted for one in parts.values()):,} in {name}"
            for name, parts in found.items()]  # fmt: skip
    return (
        " In bf16, where autocast casts what a product reads, the count has more, "
        f"{listed(more)}, and the traces have exactly those too, beside memsets."
    )
