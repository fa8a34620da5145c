"""What compiling takes, and after how many calls or steps it has paid."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.models import WAYS
from a2lib.report.chapters.compile.rows import CONTEXT, HOW, LENGTHS, PASSES, Compile, title
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import break_even
from a2lib.theory.transformer import SIZES

FIRSTS = ("ms_cold", "ms_warm")
DTYPE, HEAD = "fp32", 64


def attention(c: Compile, caption: str, name: str, dtype: str = "fp32", d: int = HEAD) -> Table:
    """Seconds to compile, cold by pass and from the cache, and the calls (a forward and a
    backward each) after which the cold one has paid."""
    lines = []
    for n in LENGTHS:
        rows = pick(c.grid, written="plain", dtype=dtype, head_dim=d, seq_len=n, status="ok")
        found = {p: row_of(rows, implementation="compile", pass_=p) for p in PASSES}
        if None in found.values():
            continue
        extra = {f: [float(getattr(r, f)) - float(r.ms) for r in found.values()] for f in FIRSTS}
        cells = [*map(_seconds, extra["ms_cold"]), _seconds(sum(extra["ms_warm"]))]
        lines.append([style.tokens(n), *cells, *(_calls(attention_pays(c, n, dtype, d, f))
                                                for f in FIRSTS)])  # fmt: skip
    columns = ["tokens", "cold: forward, s", "backward, s", "cached: both, s", "pays after: cold",
               "cached"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)


def attention_pays(c: Compile, n: int, dtype: str, d: int, first: str) -> float | None:
    """Calls of forward and backward after which compiling has paid; None where it is not ahead by
    more than the spread, NaN where not measured."""
    rows = pick(c.grid, written="plain", dtype=dtype, head_dim=d, seq_len=n, status="ok")
    sides = {i: [row_of(rows, implementation=i, pass_=p) for p in PASSES]
             for i in ("eager", "compile")}  # fmt: skip
    if any(r is None for side in sides.values() for r in side):
        return math.nan
    eager, compiled = (sum(float(r.ms) for r in side) for side in sides.values())
    if not _ahead(sides["compile"], sides["eager"]):
        return None
    extra = sum(float(getattr(r, first)) for r in sides["compile"]) - compiled
    return break_even(extra, eager, compiled)


def models(c: Compile, caption: str, name: str) -> Table:
    """Seconds to compile each model, by the excess of its first step over eager's, the kernels that
    Inductor wrote, and the steps after which that has paid."""
    lines = []
    for precision in ("fp32", "bf16"):
        for model in MODELS:
            for way, words in WAYS.items():
                row = c.model(model, way, precision=precision)
                if row is None:
                    continue
                extra = [model_extra(c, model, way, precision, f) for f in FIRSTS]
                first = c.model(model, way, "forward", precision=precision)
                forward = MISSING if first is None else _seconds(float(first.ms_cold) - first.ms)
                lines.append(
                    [
                        title(model),
                        precision,
                        words,
                        _seconds(extra[0]),
                        forward,
                        _seconds(extra[1]),
                        _whole(row.kernels_written),
                        *(_calls(model_pays(c, model, way, precision, f)) for f in FIRSTS),
                    ]
                )
    columns = ["model", "precision", "compiled", "cold, s", "of it forward", "cached, s",
               "kernels written", "pays after: cold", "cached"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=3)


def model_extra(c: Compile, model: str, way: str, precision: str, first: str) -> float | None:
    """What the first step takes beyond a steady one, in ms, less the same of eager, whose first
    steps allocate and make the optimizer's state as well: those of a warmed process."""
    row, eager = (c.model(model, w, precision=precision) for w in (way, "none"))
    if row is None or eager is None:
        return None
    plain = max(0.0, float(eager.ms_warm) - float(eager.ms))
    return float(getattr(row, first)) - float(row.ms) - plain


def model_pays(c: Compile, model: str, way: str, precision: str, first: str) -> float | None:
    """Steps after which compiling has paid; None where it is not ahead by more than the spread, NaN
    where not measured."""
    extra = model_extra(c, model, way, precision, first)
    if extra is None:
        return math.nan
    row, eager = (c.model(model, w, precision=precision) for w in (way, "none"))
    return break_even(extra, float(eager.ms), float(row.ms)) if _ahead([row], [eager]) else None


def _ahead(compiled: list, eager: list) -> bool:
    """Whether compiled is faster by more than the spread, p20 to p80, of both: of a difference
    within it no number of calls follows."""

    def end(rows, name):
        ends = [float(getattr(row, name)) for row in rows]
        return sum(float(r.ms) if math.isnan(e) else e for r, e in zip(rows, ends, strict=True))

    return end(compiled, "ms_p80") < end(eager, "ms_p20")


def sentence(c: Compile) -> Markdown:
    """What compiling takes from an empty cache, and after how many calls and steps it has paid:
    attention by length, models by way."""
    calls = {f"{style.tokens(n)} tokens": attention_pays(c, n, DTYPE, HEAD, "ms_cold")
             for n in LENGTHS}  # fmt: skip
    attention_ = _paid(f"compiling attention ({DTYPE}, heads of {HEAD})", "calls at", calls)
    told = []
    for way in WAYS:
        steps = {title(m): model_pays(c, m, way, DTYPE, "ms_cold") for m in MODELS}
        took = [x / 1e3 for m in MODELS if (x := model_extra(c, m, way, DTYPE, "ms_cold"))]
        seconds = f" takes {style.between(took, '{:.0f}'.format)} s and" if took else ""
        told.append(_paid(f"{HOW[way]}{seconds}", "steps of", steps))
    told = list(filter(None, told))
    said = [f"From an empty cache {attention_}."] if attention_ else []
    if told:
        said.append(
            f"Compiling a train-step ({DTYPE}, {CONTEXT} tokens) {'; '.join(told)}. One block is "
            "compiled for all, so blocks take much the same for any model"
        )
        each = [x / 1e3 / SIZES[m].num_layers for m in MODELS
                if (x := model_extra(c, m, "model", DTYPE, "ms_cold"))]  # fmt: skip
        if each:
            said[-1] += f"; one graph takes {style.between(each, '{:.1f}'.format)} s for each block"
        said[-1] += "." + _from_the_cache(c)
    return Markdown("\n\n".join(said) or c.not_yet("what compiling takes, and when it has paid"))


def _from_the_cache(c: Compile, model: str = "small") -> str:
    """That the cache keeps less of a graph in bf16, where the rows have it so."""
    took = [model_extra(c, model, "model", p, "ms_warm") for p in ("fp32", "bf16")]
    if any(x is None or math.isnan(x) for x in took) or took[1] < 2 * took[0]:
        return ""
    seconds = [style.digits(x / 1e3, 2) for x in took]
    return (
        f" From a full cache {title(model)} as one graph still takes {seconds[0]} s, and in bf16 "
        f"{seconds[1]} s: there its products are a function with a backward of its own, for which "
        "PyTorch does not cache the joint graph. That is made again; only the kernels are found."
    )


def _paid(what: str, unit: str, found: dict[str, float | None]) -> str:
    """Where it has paid after how many, and where it is not shown to; "" where nothing is
    measured."""
    known = {where: n for where, n in found.items() if n is None or not math.isnan(n)}
    when = {where: n for where, n in known.items() if n is not None}
    paid = [f"{_calls(n)} {unit} {where}" for where, n in when.items()]
    never = [where for where, n in known.items() if n is None]
    told = [f"has paid after {listed(paid)}"] if paid else []
    if len(paid) > 3:  # the table has all
        ends = (min(when, key=when.get), max(when, key=when.get))
        told = [f"has paid after {' to '.join(f'{_calls(when[w])} {unit} {w}' for w in ends)}"]
    told += [f"is not shown to pay {unit.split()[-1].replace('of', 'for')} {listed(never)}"] if (
        never) else []  # fmt: skip
    return f"{what} {', and '.join(told)}" if told else ""


def _seconds(ms: float | None) -> str:
    return MISSING if ms is None or ms != ms else style.digits(max(ms, 0.0) / 1e3, 2)


def _calls(calls: float | None) -> str:
    if calls is None:
        return "not shown"
    return MISSING if calls != calls else f"{max(0, math.ceil(calls)):,}"


def _whole(value) -> str:
    return MISSING if pd.isna(value) else f"{int(value):,}"
