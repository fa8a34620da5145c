"""What changes where blocks are compiled and where products are in bf16: kernels, bytes, time."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.profile.answer import short, top
from a2lib.report.chapters.profile.drawing import KINDS, legend
from a2lib.report.chapters.profile.rows import (
    AUTOCAST,
    BATCH,
    COMPILED,
    CONTEXT,
    OURS,
    PLAIN,
    WAYS,
    Profile,
    title,
)
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.roofline import compiled_step, eager_step, floor, fused_step
from a2lib.theory.transformer import SIZES

NEAR = 0.02  # times that are no further apart are called the same
RATE = 0.05  # as are shares of the bandwidth
# What a way's step would be at the least, and the precision of its products.
STEPS = {"plain": (eager_step, "fp32"), "compiled": (compiled_step, "fp32"),
         "bf16": (eager_step, "bf16"), "bf16, ours, compiled": (fused_step, "bf16")}  # fmt: skip
WORDS = {str(way): words for words, way in WAYS.items()}


@dataclass(frozen=True)
class Way:
    """One train-step: its kernels, milliseconds of the ``products`` (attention's kernels with them)
    and of the ``rest``, AdamW's of the latter, and of ``copies``; both floors, and the bytes that
    the rest must move, None without ceilings."""

    kernels: int
    products: float
    rest: float
    update: float
    copies: float
    floors: tuple[float, float] | None
    moved: int | None

    @property
    def share(self) -> float:
        return self.products / (self.products + self.rest)


def measured(p: Profile, model: str, way: dict) -> Way | None:
    """What the trace and the count have of it; None where it was not traced."""
    kernels, (step, precision) = p.of(model, CONTEXT, way=way), STEPS[WORDS[str(way)]]
    if not len(kernels):
        return None
    whole = float(kernels["ms"].sum())
    products = float(kernels.loc[kernels["kind"].isin(["matmul", "attention"]), "ms"].sum())
    floors = moved = None
    if p.bandwidth is not None and precision in p.tflops:
        ceilings = p.tflops[precision] * 1e12, p.bandwidth * 1e12
        every = step(SIZES[model], BATCH, CONTEXT, precision)
        both = [floor([k for k in every if bool(k.flops) is product], *ceilings)["total"]
                for product in (True, False)]  # fmt: skip
        floors, moved = (both[0].ms, both[1].ms), both[1].bytes
    return Way(
        int(kernels["calls"].sum()), products, whole - products,
        float(pick(kernels, phase="optimizer")["ms"].sum()),
        float(pick(kernels, kind="copy")["ms"].sum()), floors, moved,
    )  # fmt: skip


def sentence(p: Profile) -> Markdown:
    """What each of the three ways changes; of two models the smaller one's number is first."""
    models = [m for m in p.models if all(measured(p, m, way) for way in WAYS.values())]
    if not models:
        return Markdown(p.not_yet("compiled steps and steps in bf16"))
    plain, compiled, narrow, ours = (
        [measured(p, model, way) for model in models] for way in (PLAIN, COMPILED, AUTOCAST, OURS)
    )
    told = [
        f"- Compiled, in fp32: {_compiled(plain, compiled)}.",
        f"- In bf16: {_narrow(p, plain, narrow)}.",
        "- In bf16, with our attention and compiled: everything that is no product takes "
        f"{_times(narrow, ours, 'rest')} of what it takes in bf16 alone, in "
        f"{_times(narrow, ours, 'kernels')} of the kernels. AdamW, which is not compiled and stays "
        f"in fp32, is {_each([w.update / (w.products + w.rest) for w in ours], '{:.0%}')} of the "
        f"kernel time, of the plain step "
        f"{_each([w.update / (w.products + w.rest) for w in plain], '{:.0%}')}.",
    ]
    shares = [_each([w.share for w in way], "{:.0%}") for way in (plain, compiled, narrow, ours)]
    told.append(
        f"\nSo the products' share of a step, {shares[0]} of the kernel time when plain, is "
        f"{shares[1]} compiled, {shares[2]} in bf16, and {shares[3]} in bf16 with our attention "
        "and compiled."
    )
    order = f"Numbers are of {listed([title(m) for m in models])}, in this order.\n\n"
    return Markdown((order if len(models) > 1 else "") + "\n".join(told))


def _compiled(plain: list[Way], compiled: list[Way]) -> str:
    same = all(abs(b.products / a.products - 1) <= NEAR for a, b in zip(plain, compiled,
                                                                       strict=True))  # fmt: skip
    text = (
        ("products take what they took" if same else
         f"products take {_times(plain, compiled, 'products')} of their time")
        + f", everything else {_times(plain, compiled, 'rest')} of its time, and the step has "
        f"{_times(plain, compiled, 'kernels')} of the kernels"
    )  # fmt: skip
    if all(way.floors for way in (*plain, *compiled)):
        before, after = ([way.floors[1] / way.rest for way in one] for one in (plain, compiled))
        text += (
            f". By count, what is no product has {_times(plain, compiled, 'moved')} of the bytes "
            f"to move, and reaches {_each(after, '{:.0%}')} of the bandwidth, when plain "
            f"{_each(before, '{:.0%}')}"
        )
        if all(abs(a - b) <= RATE for a, b in zip(before, after, strict=True)):
            text += ": what is saved are passes over memory, and those left run no faster"
    return text


def _narrow(p: Profile, plain: list[Way], narrow: list[Way]) -> str:
    faster = [a.products / b.products for a, b in zip(plain, narrow, strict=True)]
    text = f"products are {_each(faster, '{:.1f}')} times as fast"
    if {"fp32", "bf16"} <= set(p.tflops):
        text += f", where the ceilings are {p.tflops['bf16'] / p.tflops['fp32']:.1f} times apart"
    return (
        f"{text}. Everything else takes {_times(plain, narrow, 'rest', '{:.2f}')} times as long: "
        "the operands of every product are cast, and copies take "
        f"{_times(plain, narrow, 'copies', '{:.1f}')} times as long"
    )


def _times(before: list[Way], after: list[Way], what: str, form: str = "{:.0%}") -> str:
    return _each([getattr(b, what) / getattr(a, what)
                  for a, b in zip(before, after, strict=True)], form)  # fmt: skip


def _each(values: list[float], form: str) -> str:
    return listed([form.format(value) for value in values])


def table(p: Profile, caption: str, name: str) -> Table:
    """Kernels, milliseconds and floors of each way, and the idle share."""
    lines = []
    for words, way in WAYS.items():
        for model in p.models:
            one = measured(p, model, way)
            if one is None:
                continue
            floors, gap = one.floors or (None, None), p.idle(model, CONTEXT, way)
            lines.append([
                words, title(model), f"{one.kernels:,}", time(one.products), time(floors[0]),
                time(one.rest), time(floors[1]), f"{one.share:.0%}",
                MISSING if gap is None else style.between(gap, "{:.0%}".format),
            ])  # fmt: skip
    columns = ["way", "model", "kernels", "products, ms", "floor", "the rest, ms", "floor ",
               "share of products", "idle"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def tops(p: Profile, caption: str, name: str) -> Table:
    """The top kernel of a forward in each way: its class, its calls, its share."""
    lines = []
    for words, way in WAYS.items():
        for model in p.models:
            kernels = p.named(model, CONTEXT, "forward", way)
            if len(kernels):
                kernel, n, of_all = top(kernels)
                kind = pick(kernels, kernel=kernel)["kind"].iloc[0]
                lines.append([words, title(model), f"`{short(kernel)}`", kind, n, f"{of_all:.1%}"])
    columns = ["way", "model", "kernel", "class", "calls", "share"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=4, keys=2)


def chart(p: Profile) -> Chart:
    """Milliseconds of a step by class of its kernels, a bar for each way, the models below each
    other."""
    bars = {(model, words): p.of(model, CONTEXT, way=way)
            for model in p.models for words, way in WAYS.items()}  # fmt: skip
    bars = {at: kernels for at, kernels in bars.items() if len(kernels)}
    if len({words for _, words in bars}) < 2:
        return panels.empty()
    present = set().union(*(set(kernels["kind"]) for kernels in bars.values()))
    kinds = [kind for kind in KINDS if kind in present]
    models = list(dict.fromkeys(model for model, _ in bars))

    def draw(figure):
        axes = figure.subplots(len(models), 1, squeeze=False)[:, 0]
        for ax, model in zip(axes, models, strict=True):
            mine = [(words, kernels) for (name, words), kernels in bars.items() if name == model]
            for y, (_, kernels) in enumerate(reversed(mine)):
                left = 0.0
                for kind in kinds:
                    ms = float(pick(kernels, kind=kind)["ms"].sum())
                    if ms:
                        ax.barh(y, ms, left=left, height=0.66, color=KINDS[kind], linewidth=0)
                    left += ms
                ax.annotate(style.digits(left), (left, y), xytext=(4, 0),
                            textcoords="offset points", va="center")  # fmt: skip
            names = [words.replace("ours, ", "ours,\n") for words, _ in reversed(mine)]
            ax.set_yticks(range(len(mine)), names)
            ax.set_title(f"{title(model)}, {CONTEXT} tokens", loc="left")
            ax.margins(x=0.12)
            ax.grid(False, axis="y")
        axes[-1].set_xlabel("time of kernels in a step (ms)")
        legend(figure, {kind: KINDS[kind] for kind in kinds})

    return Chart(draw, height=0.9 + 2.1 * len(models) + 0.22 * -(-len(kinds) // 3))
