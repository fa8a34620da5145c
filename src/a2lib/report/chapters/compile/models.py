"""Whole models: the gain that the kernels allow, and the one measured."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.rows import BATCH, CONTEXT, Compile, title
from a2lib.report.chapters.measured import reason
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.attention import eager_launches
from a2lib.theory.roofline import Floor, compiled_step, eager_step, floor
from a2lib.theory.transformer import SIZES

ABOVE = 1.02  # times the allowed gain: more than the steps' own spread
PHASES = ("forward", "backward", "optimizer", "wall")
WAYS = {"blocks": "blocks", "model": "one graph"}
# The three of the question, by phases of a train-step.
ASKED = {"forward": ("forward",), "forward and backward": ("forward", "loss", "backward"),
         "train-step": ("wall",)}  # fmt: skip


def floors(c: Compile, model: str, precision: str, context: int = CONTEXT) -> tuple[Floor, Floor]:
    """The floor of an eager and of a compiled train-step; () where ceilings are not measured."""
    if c.bandwidth is None or precision not in c.tflops:
        return ()
    made = []
    for step in (eager_step, compiled_step):
        kernels = step(SIZES[model], BATCH, context, precision)
        rates = c.tflops[precision] * 1e12, c.bandwidth * 1e12
        made.append(floor(kernels, *rates)["total"])
    return tuple(made)


def per_launch(c: Compile) -> float | None:
    """The host's time for a launch in eager mode, in us: that of eager attention's forward at its
    shortest length over its kernels, as the flash chapter measured them; None without rows."""
    rows = pick(c.causal, implementation="eager", pass_="forward", status="ok")
    rows = rows[rows["ms_host"].notna()]
    if not len(rows):
        return None
    shortest = rows[rows["seq_len"] == rows["seq_len"].min()]
    return 1e3 * float(shortest["ms_host"].median()) / eager_launches("forward")


def expected(c: Compile, model: str, precision: str, context: int = CONTEXT) -> float | None:
    """The gain of a train-step by its floor and by the host: eager over compiled, each the larger
    of its kernels' floor and its launches at the host's time for one."""
    both, cost = floors(c, model, precision, context), per_launch(c)
    if not both or cost is None:
        return None
    eager, compiled = (max(f.ms, f.launches * cost / 1e3) for f in both)
    return eager / compiled


def estimate(c: Compile, caption: str, name: str) -> Table:
    """Launches, bytes and floor of a train-step, eager and compiled, the host's time for eager's
    launches, and the gain both allow."""
    lines, cost = [], per_launch(c)
    for precision in ("fp32", "bf16"):
        for model in MODELS:
            both = floors(c, model, precision)
            if not both or cost is None:
                continue
            eager, compiled = both
            lines.append([
                title(model), precision, f"{eager.launches:,}", f"{compiled.launches:,}",
                style.digits(eager.bytes / 1e9), style.digits(compiled.bytes / 1e9),
                style.digits(eager.launches * cost / 1e3), style.digits(eager.ms),
                style.digits(compiled.ms), f"{expected(c, model, precision):.2f}",
            ])  # fmt: skip
    columns = ["model", "precision", "launches: eager", "compiled", "GB: eager", "compiled ",
               "eager's launches on the host, ms", "floor, ms: eager", "compiled  ",
               "gain they allow"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def sentence(c: Compile) -> Markdown:
    """How the allowed gain goes with size and precision, and what limits the smallest."""
    cost = per_launch(c)
    known = [(m, floors(c, m, "fp32")) for m in MODELS]
    if cost is None or not all(both for _, both in known):
        return Markdown(c.not_yet("the ceilings and launches that an estimate needs"))
    gains = {p: [expected(c, m, p) for m in MODELS] for p in ("fp32", "bf16") if p in c.tflops}
    held = [title(m) for m, both in known if both[0].launches * cost / 1e3 > both[0].ms]
    said = "; ".join(
        f"in {p} {values[0]:.2f} for {title(MODELS[0])} and {values[-1]:.2f} for "
        f"{title(MODELS[-1])}" for p, values in gains.items()
    )  # fmt: skip
    who = f"the host holds up {', '.join(held)}" if held else "the host holds up none of them"
    return Markdown(
        f"At {CONTEXT} tokens the kernels and launches allow these gains of a train-step: {said}. "
        f"At {cost:.0f} µs a launch, in fp32 {who}. Products and the optimizer are the same in "
        "both, so what is gained is what lies between them. The time of a launch is that of eager "
        "attention's forward, and a backward's launches cost less: where the host decides, the "
        "gain allowed is an upper bound."
    )


def table(c: Compile, caption: str, name: str) -> Table:
    """Phases of each train-step, eager and in each compiled way, and the gains."""
    lines = []
    where = c.models[["model", "context", "precision"]].drop_duplicates()
    order = {model: i for i, model in enumerate(MODELS)}
    where = sorted(
        where.itertuples(index=False),
        key=lambda w: (w.precision != "fp32", int(w.context), order.get(w.model, 99)),
    )
    for model, context, precision in where:
        for way, words in {"none": "eager", **WAYS}.items():
            rows = pick(c.models, model=model, context=context, precision=precision, compile=way)
            if not len(rows):
                continue
            at = (int(context), precision)
            cells = [_cell(rows, phase) for phase in PHASES]
            gains = [_gain(c, model, way, asked, *at) for asked in ASKED]
            known = way != "none" and model in SIZES
            allowed = expected(c, model, precision, int(context)) if known else None
            lines.append([title(model), style.tokens(context), precision, words, *cells, *gains,
                          MISSING if allowed is None else f"{allowed:.2f}"])  # fmt: skip
    columns = ["model", "tokens", "precision", "compiled", *PHASES[:-1], "train-step",
               "gain: forward", "forward and backward", "train-step ", "allowed"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=4)


def untimed(c: Compile) -> Markdown:
    """The train-steps without a time, each with its reason, and those of the question that nobody
    has tried."""
    if not len(c.models):
        return Markdown(c.not_yet("which models do not fit"))
    rows = c.models[(c.models["status"] != "ok") & (c.models["phase"] == "wall")]
    names = {"none": "eager", **WAYS}
    lines = [
        f"- {title(r.model)}, {style.tokens(r.context)} tokens, {r.precision}, {names[r.compile]}: "
        f"{style.STATUS[r.status]} ({reason(r.note)})"
        for r in rows.itertuples()
    ] or ["Every train-step that was measured has a time."]
    known = pick(c.models, context=CONTEXT, precision="fp32", phase="wall")
    left = [f"{title(model)} ({words})" for model in MODELS[:-1] for way, words in names.items()
            if not len(pick(known, model=model, compile=way))]  # fmt: skip
    if left:
        lines.append(f"\n**Not measured yet** in fp32 at {CONTEXT} tokens: {listed(left)}.")
    return Markdown("\n".join(lines))


def measured(c: Compile) -> Markdown:
    """The measured gains of the question's three, one graph beside blocks, and which train-steps
    gain more than the estimate allows."""
    told, above, beside, apart = [], [], {}, []
    for precision in ("fp32", "bf16"):
        at = (CONTEXT, precision)
        gains = {asked: [g for m in MODELS for w in WAYS if (g := ratio(c, m, w, asked, *at))]
                 for asked in ASKED}  # fmt: skip
        if not gains["train-step"]:
            continue
        each = [f"a {asked} {style.between(found, '{:.2f}'.format)}"
                for asked, found in gains.items() if found]  # fmt: skip
        told.append(f"in {precision} {listed(each)} times as fast")
        for model in MODELS:
            allowed = expected(c, model, precision)
            above += [f"{title(model)} ({words}, {precision})" for way, words in WAYS.items()
                      if allowed and (ratio(c, model, way, "train-step", *at) or 0)
                      > ABOVE * allowed]  # fmt: skip
            both = [c.model(model, way, precision=precision) for way in ("model", "blocks")]
            if None not in both:
                beside.setdefault(title(model), []).append(float(both[0].ms) / float(both[1].ms))
            both[1] = c.model(model, "none", precision=precision)
            if None not in both and both[0].run != both[1].run:
                apart.append(title(model))
    if not told:
        return Markdown(c.not_yet("whole models, compiled against eager"))
    said = f"At {CONTEXT} tokens compiling makes {'; '.join(told)}."
    if beside:
        shares = [share for found in beside.values() for share in found]
        said += (
            f" As one graph a train-step takes {style.between(shares, '{:.2f}'.format)} of the "
            f"time that it takes with its blocks compiled ({listed(list(beside))})."
        )
    if above:
        said += f" More than the estimate allows, so that it misses something: {', '.join(above)}."
    if apart:
        names = listed(list(dict.fromkeys(apart)))
        said += f" One graph and eager are of different runs for {names}."
    return Markdown(said)


def _cell(rows: pd.DataFrame, phase: str) -> str:
    r = next(pick(rows, phase=phase).itertuples(), None)
    if r is None:
        return MISSING
    if r.status != "ok":
        return style.STATUS[r.status]
    return style.digits(float(r.ms))


def ratio(c: Compile, model: str, way: str, asked: str, context: int, precision: str):
    """Eager over compiled time of one of ``ASKED``; None where a phase has no time."""
    times = []
    for one in ("none", way):
        rows = [c.model(model, one, phase, context, precision) for phase in ASKED[asked]]
        times.append(None if None in rows else sum(float(row.ms) for row in rows))
    return None if None in times else times[0] / times[1]


def _gain(c: Compile, model: str, way: str, *where) -> str:
    found = None if way == "none" else ratio(c, model, way, *where)
    return MISSING if found is None else f"{found:.2f}"
