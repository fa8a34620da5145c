"""The first step of a process taken apart."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS, TITLES, Benchmark, half
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table

REPEATS = 3  # processes that a whole sweep has of each preparation
# What each preparation spares the first step, beside the one before it.
SPARED = (("product", "nothing", "cuBLAS"), ("block", "product", "kernels and autograd"),
          ("memory", "block", "allocator"))  # fmt: skip
LADDER = ("nothing", "product", "block", "memory", "modules")
# (model, what is compiled) -> the preparations whose first steps are measured.
PREPARED = {("small", "none"): LADDER, ("2.7B", "none"): LADDER,
            ("small", "blocks"): ("nothing", "cached")}  # fmt: skip


def part(b: Benchmark, model: str, prepared: str, name: str, compile_: str = "none"):
    """The median over the processes of a part, in ms, or None."""
    rows = pick(b.firsts, model=model, prepared=prepared, part=name, compile=compile_, status="ok")
    return float(rows["ms"].median()) if len(rows) else None


def excess(b: Benchmark, model: str, prepared: str, compile_: str = "none") -> float | None:
    """What the first step takes beyond a steady one of the same process, in ms."""
    first = part(b, model, prepared, "first", compile_)
    steady = part(b, model, prepared, "steady", compile_)
    return None if first is None or steady is None else first - steady


def table(b: Benchmark, caption: str, name: str) -> Table:
    """The first step's excess, and what each preparation takes from it."""
    lines = []
    for model in MODELS:
        for compile_ in ("none", "blocks"):
            whole = excess(b, model, "nothing", compile_)
            if whole is None:
                continue
            cells = [part(b, model, "nothing", "steady", compile_), whole]
            for prepared, before, _ in SPARED:
                cells.append(_less(excess(b, model, before, compile_),
                                   excess(b, model, prepared, compile_)))  # fmt: skip
            cells.append(excess(b, model, "memory", compile_))
            cells.append(_less(whole, excess(b, model, "cached", compile_)))
            cells.append(part(b, model, "nothing", "context", compile_))
            cells.append(part(b, model, "modules", "context", compile_))
            cells.append(excess(b, model, "modules", compile_))
            title = TITLES[model] + (", compiled" if compile_ != "none" else "")
            lines.append([title, *("·" if c is None else _signed(c) for c in cells)])
    columns = ["model", "steady step", "first step: more", *(title for *_, title in SPARED), "rest",
               "compiling", "context (before)", "all loaded: context",
               "first step: more "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence(b: Benchmark) -> Markdown:
    """The largest part of each model's first step, and what compiling adds."""
    told = []
    for model in MODELS:
        whole = excess(b, model, "nothing")
        known = {title: _less(excess(b, model, before), excess(b, model, prepared))
                 for prepared, before, title in SPARED}  # fmt: skip
        known = {title: value for title, value in known.items() if value is not None}
        if whole and known:
            most = max(known, key=known.get)
            rank = "the largest part" if len(known) == len(SPARED) else "the largest part known"
            told.append(
                f"the first step of {TITLES[model]} takes {style.digits(whole)} ms more than a "
                f"steady one, of which {most} {style.digits(known[most])} ms, {rank}"
                f"{_together(b, model, whole)}"
            )
        compiled = excess(b, model, "nothing", "blocks")
        spared = _less(compiled, excess(b, model, "cached", "blocks"))
        if spared is not None:
            told.append(
                f"with its blocks compiled that of {TITLES[model]} takes {_seconds(compiled)} s "
                f"more than a steady one, of which code on disk spares {_seconds(spared)} s"
            )
    if not told:
        return Markdown(b.not_yet("the parts of a first step"))
    lines = "\n".join(f"- {line[0].upper()}{line[1:]}." for line in told)
    rows = pick(b.firsts, part="first")
    more = f"{_loaded(b)}{_apart(b)}{_unprepared(b)}{half(rows, 'first steps')}".strip()
    return Markdown(f"{lines}\n\n{more}".strip())


def _together(b: Benchmark, model: str, whole: float) -> str:
    """What the preparations themselves take, beside what the first step takes more without them."""
    rows = pick(b.firsts, model=model, compile="none", status="ok")
    ms = rows.groupby("part")["ms"].median()
    if not {"product", "block_first", "block_second", "memory"} <= set(ms.index):
        return ""
    parts = [ms["product"], ms["block_first"] - ms["block_second"], ms["memory"]]
    return (
        f" (done beforehand, the product takes {style.digits(parts[0])} ms, a block's first step "
        f"{style.digits(parts[1])} more than its second and the memory {style.digits(parts[2])}: "
        f"{style.digits(sum(parts))} ms together, {sum(parts) / whole:.0%} of it)"
    )


def _loaded(b: Benchmark) -> str:
    """What loading every kernel at once changes."""
    told, spares = [], []
    for model in MODELS:
        contexts = [part(b, model, p, "context") for p in ("nothing", "modules")]
        more = [excess(b, model, p) for p in ("nothing", "modules")]
        if all(contexts) and all(more):
            spares.append(more[1] < more[0])
            told.append(
                f"the context of {TITLES[model]} takes {_seconds(contexts[1])} s in place of "
                f"{_seconds(contexts[0])} and its first step {_seconds(more[1])} s more than a "
                f"steady one in place of {_seconds(more[0])}"
            )
    if not told:
        return ""
    text = f" With every kernel loaded at once {'; '.join(told)}."
    if any(spares):
        return text
    return text + (
        " So it spares the first step nothing. Our reading, not tested: a library's kernels are "
        "loaded with the library's own first call, cuBLAS's within that step."
    )


def _apart(b: Benchmark) -> str:
    """By how much processes that are prepared alike differ."""
    plain = pick(b.firsts, compile="none", status="ok")
    plain = plain[plain["prepared"].isin(["nothing", *(prepared for prepared, *_ in SPARED)])]
    keys = ["model", "prepared", "repeat"]
    ms = plain.set_index([*keys, "part"])["ms"].astype(float).unstack("part")
    if not {"first", "steady"} <= set(ms.columns):
        return ""
    more = (ms["first"] - ms["steady"]).dropna().groupby(keys[:2])
    apart = (more.max() - more.min())[more.size() > 1]
    if not len(apart):
        return ""
    return f" Processes that are prepared alike differ by up to {style.digits(apart.max())} ms."


def _unprepared(b: Benchmark) -> str:
    """The preparations that nobody has run yet; where there is one process of each, how many
    processes of the sweep are left."""
    left = []
    for (model, compile_), every in PREPARED.items():
        rows = pick(b.firsts, model=model, compile=compile_, part="first")
        names = [f"`{name}`" for name in every if not (rows["prepared"] == name).any()]
        how = ", compiled" if compile_ != "none" else ""
        left += [f"{listed(names)} of {TITLES[model]}{how}"] if names else []
    if left:
        return f" **Not measured yet**, of the preparations: {'; '.join(left)}."
    keys = ["model", "compile", "prepared", "repeat"]
    there = len(pick(b.firsts, part="first").drop_duplicates(keys))
    whole = REPEATS * sum(map(len, PREPARED.values()))
    if there >= whole:
        return ""
    return f" **Not measured yet**: {whole - there} of the {whole} processes of the sweep."


def _less(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else before - after


def _seconds(ms: float) -> str:
    return _signed(ms / 1e3)


def _signed(value: float) -> str:
    return ("−" if value < 0 else "") + style.digits(abs(value))
