"""A step's time with and without sharding."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.measured import HOST, refused, switched, time
from a2lib.report.chapters.sharded_optimizer.rows import (
    MAIN,
    SETTINGS,
    SIDES,
    Setting,
    Sharding,
    in_order,
    name,
)
from a2lib.report.metrics import pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

HOW = {True: "captured", False: "launched"}
HEADS = ["", "ms", "p20 to p80", "over plain", "one GPU", "update", "host",
         "by rank: least / median / most"]  # fmt: skip


def sentence(c: Sharding) -> Markdown:
    """optimizer_state_sharding_accounting (b), in words."""
    told, hosts = [], []
    for setting in SETTINGS:
        for capture in HOW:
            pair = c.pair(capture, setting)
            if pair is None:
                continue
            plain, sharded = pair
            text = (
                f"For {setting.label}, {HOW[capture]}, a step takes {time(sharded.ms)} ms with "
                f"sharding and {time(plain.ms)} without, {_verdict(sharded, plain)}; its update, "
                f"exchange included, {time(sharded.ms_optimizer)} ms and "
                f"{time(plain.ms_optimizer)}"
            )
            hosts += [setting.label] * (not capture and _by_host(sharded) and _by_host(plain))
            told.append(text + ".")
    if hosts:
        told.append(
            f"Launched, for {listed(hosts)} the host takes as long to issue a step as the step "
            "lasts: it is its time that is compared, and another host gives another ratio."
        )
    told += _older(c)
    told += _before(c)
    zero, alone = c.time("zero", "torch_ddp"), c.time("plain", "torch_ddp")
    if zero is not None and alone is not None:
        told.append(
            f"PyTorch's ZeroRedundancyOptimizer in its DDP takes {time(zero.ms)} ms, its DDP with "
            f"AdamW {time(alone.ms)}, both launched, a ratio of "
            f"{float(zero.ms) / float(alone.ms):.3f}"
        )
        pair = c.pair(capture=False)
        told[-1] += "." if pair is None else (
            f"; ours, launched, takes {float(pair[1].ms) / float(zero.ms):.2f} times "
            "ZeroRedundancyOptimizer's step."
        )  # fmt: skip
    return Markdown(" ".join(told) or c.not_yet("a step with and without sharding, in turns"))


def _older(c: Sharding) -> list[str]:
    """Which rows are of older code."""
    return [
        f"The rows of {SIDES[plain.side] or 'NCCL'}, {HOW[capture]}, are of an older commit "
        f"({time(sharded.ms)} ms with sharding and {time(plain.ms)} without, "
        f"{_verdict(sharded, plain)}): no answer of this page is taken from them."
        for capture in HOW for plain, sharded in c.older(capture)
    ]  # fmt: skip


def _before(c: Sharding) -> list[str]:
    """The undivided step beside that of the chapter before, where that is of other code."""
    pair = c.pair(capture=True)
    other = None if pair is None else c.elsewhere(pair[0])
    if other is None or c.one_commit(pair[0], other):
        return []
    return [
        f"The step without sharding of {MAIN.label}, captured, takes {time(other.ms)} ms in "
        f"[the chapter before](ddp.md), and {time(other.ms_without)} with nothing sent, "
        f"{time(pair[0].ms_without)} here: those rows are of another commit, so compare ratios "
        "within this page."
    ]


def _verdict(sharded, plain) -> str:
    text = f"{float(sharded.ms) / float(plain.ms):.3f} times"
    return f"{text}, which is level" if metrics.level(sharded, plain) else text


def _by_host(row) -> bool:
    return not pd.isna(row.ms_host) and float(row.ms_host) >= HOST * float(row.ms)


def table(c: Sharding, setting: Setting, caption: str, label: str) -> Table:
    """A line for each way to run it and optimizer."""
    lines = [[HOW[capture], *line] for capture in HOW
             for line in frame(c.of(setting, capture=capture))]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=["step", *HEADS]), caption, label, left=2, keys=2)


def frame(rows: pd.DataFrame) -> list[list[str]]:
    """The cells of rows of one training."""
    lines = []
    for row in in_order(rows).itertuples():
        if row.status != "ok":
            reason = style.STATUS.get(row.status, row.status)
            lines.append([name(row), reason, *[MISSING] * (len(HEADS) - 2)])
            continue
        base = timed_row(pick(rows, side=row.side), optimizer="plain")
        over = MISSING if base is None else f"{float(row.ms) / float(base.ms):.3f}"
        by_rank = (row.ms_rank_min, row.ms_rank_median, row.ms_rank_max)
        lines.append([
            name(row), time(row.ms), f"{time(row.ms_p20)} to {time(row.ms_p80)}",
            over if row.optimizer != "plain" else "1", time(row.ms_without),
            time(row.ms_optimizer), time(row.ms_host), " / ".join(map(time, by_rank)),
        ])  # fmt: skip
    return lines


def untimed(c: Sharding) -> Markdown:
    """What has no time or no memory, each with its reason, and what all rows have in common."""
    if not len(c.times):
        return Markdown(c.not_yet("any of these"))
    lines = refused(c.times, lambda row: f"{row.model}, {HOW[bool(row.capture)]}, {row.precision}, "
                                         f"{name(row)}")  # fmt: skip
    lines += refused(c.memory, lambda row: f"{row.model}, memory, {row.precision}, {name(row)}")
    if with_ := switched(c.times):
        lines.append(f"\n{with_}")
    return Markdown("\n".join(lines) or "Every step that was tried has its time.")
