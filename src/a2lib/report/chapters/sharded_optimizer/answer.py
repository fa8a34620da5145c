"""The first screen, the estimate before it, and what was aimed at."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.sharded_optimizer.memory import off, within
from a2lib.report.chapters.sharded_optimizer.rows import (
    MAIN,
    WORLD_SIZE,
    Sharding,
    exchange_s,
    formula,
    gb,
    name,
    update_s,
    weight_bytes,
)
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.sharding import CHUNKS, pipelined_s

# What is aimed at: of a step's time over that without sharding, and of memory over the formula.
RATIO, OFF = 1.0, 0.03


def sentence(c: Sharding) -> Markdown:
    """What sharding saves by the formula and as measured, and what it costs a step."""
    whole, part = (sum(formula(o).at("after").values()) for o in ("plain", "sharded"))
    text = (
        f"**The answer.** Weights, gradients and AdamW's state of {MAIN.label} are "
        f"{gb(whole)} GB on each of {WORLD_SIZE} GPUs after an update, and {gb(part)} GB where "
        "each keeps half of the state."
    )
    rows = [c.held(o, "after") for o in ("plain", "sharded")]
    if None not in rows:
        there, here = (row.present_bytes for row in rows)
        worst = max(abs(off(row)) for row in rows)
        text += (f" Measured: {gb(there)} and {gb(here)} GB, within {within(worst)} of the "
                 "formula.")  # fmt: skip
    missing = [] if None not in rows else ["the same by the allocator"]
    for capture, how in ((True, "replayed from a CUDA graph"), (False, "launched from Python")):
        pair = c.pair(capture)
        if pair is not None:
            plain, sharded = pair
            text += (f" A step {how} takes {time(sharded.ms)} ms in place of {time(plain.ms)}, "
                     f"{ratio(sharded, plain):.3f} times{_by_level(sharded, plain)}.")  # fmt: skip
        else:
            missing.append(f"a step {how}")
    return Markdown(text + (f" {c.not_yet(listed(missing))}" if missing else ""))


def estimate(c: Sharding) -> Markdown:
    """The update that is saved against the exchange that is added, before anything is measured."""
    update, own, (gather, measured) = update_s(c), update_s(c, WORLD_SIZE), exchange_s(c)
    by = "measured all-gathers" if measured else f"the maker's {c.link / 1e9:.0f} GB/s"
    after, pipelined = own + gather, pipelined_s(own, gather, CHUNKS)
    longer = "longer" if gather > update - own else "shorter"
    verdict = "more" if pipelined > update else "less"
    return Markdown(
        f"A fused update reads weight, gradient and both moments and writes all but the gradient: "
        f"28 bytes a parameter, {_ms(update)} ms for {MAIN.label}. Half of it takes {_ms(own)} ms. "
        f"In exchange half of the weights, {gb(weight_bytes() / WORLD_SIZE)} GB, crosses "
        f"the link in each direction, {_ms(gather)} ms by {by}: {longer} than what is saved. After "
        f"the update that would make {_ms(after)} ms; in {CHUNKS} chunks, each sent while the next "
        f"is updated, {_ms(pipelined)} ms, {verdict} than the {_ms(update)} ms of the whole update."
    )


def hides(c: Sharding) -> Markdown:
    """The update with its exchange as measured, beside that estimate."""
    update, own, (gather, _) = update_s(c), update_s(c, WORLD_SIZE), exchange_s(c)
    pair = c.pair(capture=False)
    if pair is None:
        return Markdown(c.not_yet("whether the exchange hides beside the update"))
    plain, sharded = (float(row.ms_optimizer) for row in pair)
    added = sharded - plain * own / update
    share = max(0.0, 1 - added / (1e3 * gather))
    better = pipelined_s(own, gather, CHUNKS) > update and sharded < plain
    more = (" Against the estimate that is less than the whole update: an update takes longer than "
            "its bytes do, so half of one saves more than was counted.")  # fmt: skip
    return Markdown(
        f"Measured, launched, the whole update takes {time(plain)} ms, {plain / 1e3 / update:.2f} "
        f"times what its bytes take, and ours with its exchange {time(sharded)}: of the "
        f"{_ms(gather)} ms that the exchange takes by the estimate, {share:.0%} run beside half of "
        "an update."
        + more * better
    )


def targets(c: Sharding, caption: str, label: str) -> Table:
    """What was aimed at, what came out, and whether that is met."""
    lines = []
    for capture, how in ((True, "captured"), (False, "launched")):
        pair = c.pair(capture)
        value = None if pair is None else ratio(pair[1], pair[0])
        together = "" if pair is None or pair[0].run == pair[1].run else ", two runs"
        what = MISSING if pair is None else name(pair[1])
        lines.append([f"step, {how}", what, "the same without sharding", f"{RATIO:.2f}",
                      *_verdict(value, RATIO, "{:.3f}", together)])  # fmt: skip
    for optimizer in ("plain", "sharded"):
        rows = [c.held(optimizer, moment) for moment in ("init", "before", "after")]
        value = None if None in rows else max(abs(off(row)) for row in rows)
        what = MISSING if value is None else name(rows[0])
        lines.append(["memory, three moments", what, "the formula", f"{OFF:.0%} off",
                      *_verdict(value, OFF, "{:.2%}")])  # fmt: skip
    columns = ["", "what", "against", "at most", "came out", "verdict"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=3, keys=2)


def _by_level(one, other) -> str:
    return ", which is level" if metrics.level(one, other) else ""


def ratio(one, other) -> float:
    return float(one.ms) / float(other.ms)


def _verdict(value: float | None, limit: float, form: str, more: str = "") -> list[str]:
    if value is None:
        return [MISSING, MISSING]
    return [form.format(value), ("met" if value <= limit else "missed") + more]


def _ms(seconds: float) -> str:
    return time(1e3 * seconds)
