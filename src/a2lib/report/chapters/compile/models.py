"""Whole models: what compiling gains, what one graph changes beside blocks, and why."""

from __future__ import annotations

import pandas as pd

from a2lib.report import provenance, style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.rows import BATCH, CONTEXT, Compile, title
from a2lib.report.chapters.measured import HOST, reason, time
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.roofline import Floor, compiled_step, eager_step, floor
from a2lib.theory.transformer import SIZES

PRECISIONS = ("fp32", "bf16")
PHASES = ("forward", "backward", "wall")
WAYS = {"blocks": "blocks", "model": "one graph"}
NAMES = {"none": "eager", **WAYS}
SAID = {"none": "eager", "blocks": "in blocks", "model": "as one graph"}
TO_MODEL = {title(model): model for model in MODELS}
# The three of the question, by phases of a train-step.
ASKED = {"forward": ("forward",), "forward and backward": ("forward", "loss", "backward"),
         "train-step": ("wall",)}  # fmt: skip
GAINS = ["gain: forward", "and backward", "train-step "]


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


def held_up(c: Compile, model: str, way: str, precision: str, context: int = CONTEXT) -> bool:
    """Whether the host takes nearly as long to issue the train-step as it lasts."""
    wall, issued = (c.model(model, way, p, context, precision) for p in ("wall", "step"))
    if None in (wall, issued) or pd.isna(issued.ms_host):
        return False
    return float(issued.ms_host) >= HOST * float(wall.ms)


def moved(c: Compile, model: str, precision: str) -> tuple[int, int] | None:
    """(eager's, compiled's) bytes of a train-step: as derived, and of blocks and loss as Inductor
    counts them, with the optimizer's as derived. None where a part is missing."""
    both, row = floors(c, model, precision), c.model(model, "blocks", precision=precision)
    if not both or row is None or pd.isna(row.moved_bytes):
        return None
    kernels = eager_step(SIZES[model], BATCH, CONTEXT, precision)
    optimizer = sum((k.read + k.written) * k.count for k in kernels if k.phase == "optimizer")
    return both[0].bytes, int(row.moved_bytes) + optimizer


def why(c: Compile, caption: str, name: str) -> Table:
    """Launches, bytes and floors of a train-step, eager and in blocks, beside its times."""
    lines = []
    for precision in PRECISIONS:
        for model in MODELS:
            eager, blocks = (c.model(model, w, precision=precision) for w in ("none", "blocks"))
            bytes_, both = moved(c, model, precision), floors(c, model, precision)
            if bytes_ is None or eager is None:
                continue
            called = int(blocks.kernels_called + blocks.library_calls)
            lines.append([
                f"{title(model)}, {precision}", _arrow(both[0].launches, called, style.tokens),
                _arrow(*bytes_, lambda b: style.digits(b / 1e9)),
                _arrow(*(f.ms for f in both)), _arrow(float(eager.ms), float(blocks.ms)),
                time(c.replay(model, precision)), f"{both[0].ms / both[1].ms:.2f}",
            ])  # fmt: skip
    columns = ["model", "launches", "GB", "floor, ms", "train-step, ms",
               "replayed, ms", "floors' gain"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1)


def explained(c: Compile) -> Markdown:
    """In fp32: the gaps between eager's launches, and the bandwidth of what compiling saves."""
    gaps, rates, less = [], [], []
    for model in MODELS:
        rows = [c.model(model, way) for way in ("none", "blocks")]
        bytes_, replay = moved(c, model, "fp32"), c.replay(model, "fp32")
        if None in (*rows, bytes_, replay) or replay <= float(rows[1].ms):
            continue
        gaps.append((float(rows[0].ms) - replay) / (float(rows[0].ms) - float(rows[1].ms)))
        less.append((bytes_[0] - bytes_[1]) / bytes_[0])
        rates.append((bytes_[0] - bytes_[1]) / (replay - float(rows[1].ms)) / 1e9)
    if not rates:
        return Markdown(c.not_yet("which part of the gain is launches and which is bytes"))
    return Markdown(
        f"In fp32 {style.between(gaps, '{:.0%}'.format)} of the time gained is that of gaps "
        "between eager's launches, which a replay has not either. The rest is memory traffic: "
        f"{style.between(less, '{:.0%}'.format)} of eager's bytes are not moved, and saved at "
        f"{style.between(rates, '{:.1f}'.format)} TB/s, where a copy reaches {c.bandwidth:.1f}. "
        "Products, the larger part of a large model's step, and the optimizer are the same in both."
    )


def table(c: Compile, precision: str, caption: str, name: str) -> Table:
    """Phases of each train-step at ``CONTEXT``, eager and in each compiled way, the gains and the
    peak."""
    lines = []
    for model in MODELS:
        for way, words in NAMES.items():
            rows = pick(c.models, model=model, context=CONTEXT, precision=precision, compile=way)
            if not len(rows):
                continue
            gains = [_gain(c, model, way, asked, CONTEXT, precision) for asked in ASKED]
            wall = c.model(model, way, precision=precision)
            unknown = wall is None or pd.isna(wall.peak_bytes)
            peak = MISSING if unknown else style.digits(float(wall.peak_bytes) / 1e9)
            lines.append([title(model), words, *(_cell(rows, p) for p in PHASES), *gains, peak])
    columns = ["model", "way", *PHASES[:-1], "train-step", *GAINS, "peak, GB"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def lengths(c: Compile, caption: str, name: str) -> Table:
    """The train-steps of those models that were measured at several lengths, eager and in
    blocks."""
    lines = []
    known = pick(c.models, precision="fp32", phase="wall", compile="blocks")
    for model in MODELS:
        contexts = sorted({int(n) for n in pick(known, model=model)["context"]})
        for n in contexts if len(contexts) > 1 else ():
            walls = [c.model(model, way, context=n) for way in ("none", "blocks")]
            steps = [c.model(model, way, "step", n) for way in ("none", "blocks")]
            if None in (*walls, *steps):
                continue
            gains = [_gain(c, model, "blocks", asked, n, "fp32") for asked in ASKED]
            lines.append([title(model), style.tokens(n), *(time(float(r.ms)) for r in walls),
                          *(time(r.ms_host) for r in steps), *gains])  # fmt: skip
    columns = ["model", "tokens", "train-step, ms: eager", "blocks", "issued in, ms: eager",
               "blocks ", *GAINS]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def at_lengths(c: Compile) -> Markdown:
    """Whose steps the host holds up at these lengths, and how the gain goes with the length where
    it holds up none."""
    rows = lengths(c, "", "").frame
    if not len(rows):
        return Markdown(c.not_yet("whole models at other lengths"))
    found, free = {way: [] for way in ("none", "blocks")}, {}
    for r in rows.itertuples(index=False):
        model, n = TO_MODEL[r.model], int(r.tokens.replace(",", ""))
        held = [way for way in found if held_up(c, model, way, "fp32", n)]
        for way in held:
            found[way].append(f"{r.model} at {r.tokens} tokens")
        if not held:
            gain = ratio(c, model, "blocks", "train-step", n, "fp32")
            free.setdefault(r.model, []).append(gain)
    told = [f"{one} {SAID[way]}" for way, held in found.items() for one in held]
    said = f"The host holds up {listed(told)}." if told else "The host holds up none of these."
    gains = [f"{style.between(g, '{:.2f}'.format)} ({model})" for model, g in free.items()]
    if gains:
        said += f" Without it the gain of a train-step is, over these lengths, {listed(gains)}."
    return Markdown(said)


def source(c: Compile, sweep: str) -> Markdown:
    """The line under the table of a sweep's train-steps."""
    narrow, usual = c.models["precision"] == "bf16", c.models["context"] == CONTEXT
    rows = {"models": ~narrow & usual, "bf16": narrow, "contexts": ~narrow}[sweep]
    command = f"papermill notebooks/compile.ipynb -p sweep {sweep}"
    return provenance.source(c.models[rows], c.runs, command)


def untimed(c: Compile) -> Markdown:
    """The train-steps without a time, each with its reason, and those of the question that nobody
    has tried."""
    if not len(c.models):
        return Markdown(c.not_yet("which models do not fit"))
    rows = c.models[(c.models["status"] != "ok") & (c.models["phase"] == "wall")]
    lines = [
        f"- {title(r.model)}, {style.tokens(r.context)} tokens, {r.precision}, {NAMES[r.compile]}: "
        f"{style.STATUS[r.status]} ({reason(r.note)})"
        for r in rows.itertuples()
    ] or ["Every train-step that was measured has a time."]
    known = pick(c.models, context=CONTEXT, precision="fp32", phase="wall")
    left = [f"{title(model)} ({words})" for model in MODELS[:-1] for way, words in NAMES.items()
            if not len(pick(known, model=model, compile=way))]  # fmt: skip
    if left:
        lines.append(f"\n**Not measured yet** in fp32 at {CONTEXT} tokens: {listed(left)}.")
    return Markdown("\n".join(lines))


def measured(c: Compile) -> Markdown:
    """The measured gains of the question's three."""
    told = []
    for precision in PRECISIONS:
        at = (CONTEXT, precision)
        gains = {asked: [g for m in MODELS for w in WAYS if (g := ratio(c, m, w, asked, *at))]
                 for asked in ASKED}  # fmt: skip
        each = [f"a {asked} {style.between(found, '{:.2f}'.format)}"
                for asked, found in gains.items() if found]  # fmt: skip
        told += [f"in {precision} {listed(each)} times as fast"] if gains["train-step"] else []
    if not told:
        return Markdown(c.not_yet("whole models, compiled against eager"))
    pairs = [[c.model(m, way, precision=p) for way in ("none", w)]
             for p in PRECISIONS for m in MODELS for w in WAYS]  # fmt: skip
    peaks = [float(b.peak_bytes) / float(a.peak_bytes) for a, b in pairs
             if a and b and not pd.isna(b.peak_bytes / a.peak_bytes)]  # fmt: skip
    said = f"At {CONTEXT} tokens compiling makes {'; '.join(told)}."
    if peaks:
        said += f" The peak of memory is {style.between(peaks, '{:.2f}'.format)} of eager's."
    return Markdown(said)


def one_graph(c: Compile) -> Markdown:
    """What one graph changes beside compiled blocks: time, bytes and kernels."""
    told, apart, counted = [], [], []
    for precision in PRECISIONS:
        found = {}
        for model in MODELS:
            rows = [c.model(model, way, precision=precision) for way in ("model", "blocks")]
            if None in rows:
                continue
            found[model] = float(rows[0].ms) / float(rows[1].ms)
            if not pd.isna(rows[0].moved_bytes) and precision == "fp32":
                counted.append(rows[0].moved_bytes / rows[1].moved_bytes)
            if rows[0].run != rows[1].run:
                apart.append(title(model))
        if found:
            said = f"{style.between(found.values(), '{:.2f}'.format)} in {precision}"
            told.append(f"{said} ({listed([title(m) for m in found])})")
    if not told:
        return Markdown(c.not_yet("a model as one graph beside its blocks"))
    said = f"As one graph a train-step takes, of its time with compiled blocks, {'; '.join(told)}."
    if counted:
        said += (
            " On the GPU there is nothing to gain: by Inductor's count its fp32 graph moves "
            f"{style.between(counted, '{:.2f}'.format)} of the blocks' bytes."
        )
    calls = []
    for phase in ("forward", "backward"):
        rows = [c.model(MODELS[0], way, phase) for way in ("blocks", "model")]
        if None not in rows:
            calls.append(f"{_arrow(*(int(r.kernels_called) for r in rows), str)} {phase}")
    if calls:
        said += (
            f" Of its own kernels {title(MODELS[0])} calls {listed(calls)}: what ends a block and "
            "what begins the next can be one. The backward's count was not looked into."
        )
    steps = [c.model(MODELS[0], way, "step", precision="bf16") for way in ("blocks", "model")]
    if None not in steps and held_up(c, MODELS[0], "blocks", "bf16"):
        said += (
            f" In bf16, where the host holds {title(MODELS[0])} up, one graph is issued in "
            f"{time(steps[1].ms_host)} ms, the blocks in {time(steps[0].ms_host)} ms."
        )
    if apart:
        said += f" Graph and blocks are of different runs for {listed(list(dict.fromkeys(apart)))}."
    return Markdown(said)


def host(c: Compile) -> Markdown:
    """In bf16: whose steps the host holds up, in which way, and what is left without it."""
    held = {way: [m for m in MODELS if held_up(c, m, way, "bf16")] for way in NAMES}
    if not held["none"]:
        known = any(c.model(m, "none", precision="bf16") for m in MODELS)
        return Markdown("" if known else c.not_yet("whose time a step in bf16 is"))
    who = "; ".join(
        f"{SAID[way]}: {listed(list(map(title, found)))}" for way, found in held.items() if found
    )
    said = [
        f"In bf16 products are short, and issuing the step takes the host {HOST:.0%} or more of "
        f"its time ({who}). Their gain is one of fewer launches."
    ]
    spread = {}
    for model in held["none"]:
        eager, blocks = (c.model(model, way, precision="bf16") for way in ("none", "blocks"))
        if blocks is not None:
            low, high = eager.ms_p20 / blocks.ms_p80, eager.ms_p80 / blocks.ms_p20
            spread[high - low] = f"{low:.1f} to {high:.1f} for {title(model)}"
    if spread:
        said.append(
            "It is known no better than the host's time, which scatters: from the 20th to the 80th "
            f"percentile of both it is {spread[max(spread)]}."
        )
    beat = {}
    for model in MODELS:
        replay, blocks = c.replay(model, "bf16"), c.model(model, "blocks", precision="bf16")
        if replay and blocks is not None and replay < float(blocks.ms):
            beat[title(model)] = f"{time(replay)} ms"
    if beat:
        said.append(
            f"For {listed(list(beat))} a CUDA graph does more than the compiler: eager's own step, "
            f"captured and replayed ([another run](#benchmark-ways)), takes "
            f"{listed(list(beat.values()))}, less than compiled block by block."
        )
    free = []
    for model in MODELS:
        blocks = c.model(model, "blocks", precision="bf16")
        known = blocks is not None and c.model(model, "none", precision="bf16") is not None
        if known and not held_up(c, model, "none", "bf16"):
            gain = ratio(c, model, "blocks", "train-step", CONTEXT, "bf16")
            free.append(f"{title(model)} ({gain:.2f})")
    if free:
        said.append(f"The host does not hold up {listed(free)}: that gain is the GPU's own.")
    return Markdown(" ".join(said))


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


def _arrow(before, after, written=style.digits) -> str:
    return f"{written(before)} → {written(after)}"
