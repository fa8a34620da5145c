"""What compiling takes, and after how many calls or steps it has paid."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.models import WAYS
from a2lib.report.chapters.compile.rows import CONTEXT, LENGTHS, PASSES, Compile, title
from a2lib.report.metrics import pick, row_of
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import break_even

FIRSTS = ("ms_cold", "ms_warm")
HEAD = 64


def attention(c: Compile, caption: str, name: str, dtype: str = "fp32", d: int = HEAD) -> Table:
    """Seconds to compile each pass, cold and from the cache, and the calls (a forward and a
    backward each) after which the cold one has paid."""
    lines = []
    for n in LENGTHS:
        rows = pick(c.grid, written="plain", dtype=dtype, head_dim=d, seq_len=n, status="ok")
        found = {p: row_of(rows, implementation="compile", pass_=p) for p in PASSES}
        if None in found.values():
            continue
        cells = [_seconds(float(getattr(r, f)) - float(r.ms))
                 for f in FIRSTS for r in found.values()]  # fmt: skip
        lines.append([style.tokens(n), *cells, *(_calls(attention_pays(c, n, dtype, d, f))
                                                for f in FIRSTS)])  # fmt: skip
    columns = ["tokens", "cold: forward, s", "backward, s", "cached: forward, s", "backward, s ",
               "pays after: cold", "cached"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)


def attention_pays(c: Compile, n: int, dtype: str, d: int, first: str) -> float | None:
    """Calls of forward and backward after which compiling has paid; None where it never does,
    NaN where not measured."""
    rows = pick(c.grid, written="plain", dtype=dtype, head_dim=d, seq_len=n, status="ok")
    sides = {i: [row_of(rows, implementation=i, pass_=p) for p in PASSES]
             for i in ("eager", "compile")}  # fmt: skip
    if any(r is None for side in sides.values() for r in side):
        return math.nan
    eager, compiled = (sum(float(r.ms) for r in side) for side in sides.values())
    extra = sum(float(getattr(r, first)) for r in sides["compile"]) - compiled
    return break_even(extra, eager, compiled)


def models(c: Compile, caption: str, name: str) -> Table:
    """Seconds to compile each model, by the excess of its first step over eager's, kernels that
    Inductor made, and the steps after which that has paid."""
    lines = []
    for precision in ("fp32", "bf16"):
        for model in MODELS:
            for way, words in WAYS.items():
                row = c.model(model, way, precision=precision)
                if row is None:
                    continue
                extra = [model_extra(c, model, way, precision, f) for f in FIRSTS]
                phases = [c.model(model, way, p, precision=precision) for p in PASSES]
                cells = [MISSING if r is None else _seconds(float(r.ms_cold) - float(r.ms))
                         for r in phases]  # fmt: skip
                made = [_whole(getattr(row, k)) for k in ("kernels_written", "kernels_called",
                                                          "library_calls")]  # fmt: skip
                lines.append(
                    [
                        title(model),
                        precision,
                        words,
                        *cells,
                        *map(_seconds, extra),
                        *made,
                        *(_calls(model_pays(c, model, way, precision, f)) for f in FIRSTS),
                    ]
                )
    columns = ["model", "precision", "compiled", "cold: forward, s", "backward, s",
               "whole step, s", "cached: whole step, s", "kernels written", "called",
               "library calls", "pays after steps: cold", "cached"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=3)


def model_extra(c: Compile, model: str, way: str, precision: str, first: str) -> float | None:
    """What the first step takes beyond a steady one, in ms, less the same of eager, whose first
    steps allocate and make the optimizer's state as well: those of a warmed process."""
    row, eager = (c.model(model, w, precision=precision) for w in (way, "none"))
    if row is None or eager is None:
        return None
    plain = max(0.0, float(eager.ms_warm) - float(eager.ms))
    return float(getattr(row, first)) - float(row.ms) - plain


def model_pays(c: Compile, model: str, way: str, precision: str, first: str) -> float | None:
    """Steps after which compiling has paid; None where it never does, NaN where not measured."""
    extra = model_extra(c, model, way, precision, first)
    if extra is None:
        return math.nan
    row, eager = (c.model(model, w, precision=precision) for w in (way, "none"))
    return break_even(extra, float(eager.ms), float(row.ms))


def sentence(c: Compile) -> Markdown:
    """The cost and the break-even of attention at the grid's ends and of each model."""
    told = []
    for n in LENGTHS:
        calls = attention_pays(c, n, "fp32", HEAD, "ms_cold")
        if calls is None:
            told.append(f"attention at {style.tokens(n)} tokens never")
        elif not math.isnan(calls):
            told.append(f"attention at {style.tokens(n)} tokens after {_calls(calls)} calls")
    for model in MODELS:
        for way, words in WAYS.items():
            steps = model_pays(c, model, way, "fp32", "ms_cold")
            if steps is None:
                told.append(f"a train-step of {title(model)} ({words}) never")
            elif not math.isnan(steps):
                told.append(f"a train-step of {title(model)} ({words}) after {_calls(steps)} steps")
    if not told:
        return Markdown(c.not_yet("what compiling takes, and when it has paid"))
    return Markdown(
        f"From an empty cache compiling has paid, in fp32 and for models at {CONTEXT} tokens: "
        f"{'; '.join(told)}."
    )


def _seconds(ms: float | None) -> str:
    return MISSING if ms is None or ms != ms else style.digits(max(ms, 0.0) / 1e3, 2)


def _calls(calls: float | None) -> str:
    if calls is None:
        return "never"
    return MISSING if calls != calls else f"{max(0, math.ceil(calls)):,}"


def _whole(value) -> str:
    return MISSING if pd.isna(value) else f"{int(value):,}"
