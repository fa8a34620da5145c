"""Every trace: its kernels by class and part, and those that take the most time."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.profile.answer import part_name, short
from a2lib.report.chapters.profile.rows import CONTEXT, WAYS, Profile, title
from a2lib.report.tables import Markdown, Table, folded

MOST = 15  # kernels of a step that are listed
ALWAYS = 3  # lines from which a table is folded away


def lists(p: Profile) -> Markdown:
    """For each model and way at the usual context: totals by phase, class and part, and the top
    kernels, each folded away."""
    text = []
    for words, way in WAYS.items():
        for model in p.models:
            kernels = p.of(model, CONTEXT, way=way)
            if not len(kernels):
                continue
            label = f"{model}-{'-'.join(way.values())}".lower().replace(".", "")
            what = f"{title(model)}, {CONTEXT} tokens, {words}"
            for table in (
                totals(kernels, f"{what}: a step by phase, class and part",
                       f"tab-profile-totals-{label}"),
                tops(kernels, f"{what}: the {MOST} kernels of a step with the most time",
                     f"tab-profile-top-{label}"),
            ):  # fmt: skip
                text.append(folded(table, longest=ALWAYS))
    return Markdown("\n\n".join(text) if text else p.not_yet("the kernels of a step"))


def totals(kernels: pd.DataFrame, caption: str, name: str) -> Table:
    """Calls, milliseconds and share of each phase, class and part, most time first."""
    sums = kernels.groupby(["phase", "kind", "part"])[["calls", "ms"]].sum()
    sums, whole = sums.sort_values("ms", ascending=False), kernels["ms"].sum()
    lines = []
    for (phase, kind, part), row in zip(sums.index, sums.itertuples(), strict=True):
        lines.append([phase, kind, part_name(part), int(row.calls), style.digits(row.ms),
                      f"{row.ms / whole:.1%}"])  # fmt: skip
    columns = ["phase", "class", "launched by", "calls", "ms", "share"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=1)


def tops(kernels: pd.DataFrame, caption: str, name: str) -> Table:
    """The kernels with the most time, by phase: calls, milliseconds, the median of one."""
    groups = kernels[kernels["kernel"] != "rest"].groupby(["phase", "kind", "kernel"])
    sums = groups[["calls", "ms"]].sum().sort_values("ms", ascending=False).head(MOST)
    whole, lines = kernels["ms"].sum(), []
    for (phase, kind, kernel), row in zip(sums.index, sums.itertuples(), strict=True):
        lines.append([phase, kind, f"`{short(kernel)}`", int(row.calls), style.digits(row.ms),
                      style.digits(1e3 * row.ms / row.calls), f"{row.ms / whole:.1%}"])  # fmt: skip
    columns = ["phase", "class", "kernel", "calls", "ms", "µs each", "share"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=1)
