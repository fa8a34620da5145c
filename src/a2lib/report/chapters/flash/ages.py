"""Of which commit ours is in each part of the chapter, and what is set side by side across them."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash.rows import SECOND, Flash
from a2lib.report.metrics import OURS, pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import Markdown

PLANS = "{download}`attention/plans.py <../src/a2lib/attention/plans.py>`"
PLANNED = "2026-11-22T06:12"  # when they came; a run that started before is without them
CUDNN = "sdpa_cudnn"
HOST = {"forward": "forward", "end_to_end": "end to end"}
SHORTEST = 128
SWEEP = "the handout's sweep"
BOARD, BOARD_SECOND = "the leaderboard's shape", "the same on the H100"


def parts(flash: Flash) -> dict[str, pd.DataFrame]:
    """The timed rows of each part, by its name."""
    first = flash.protocol[flash.protocol["device"] == data.PUBLISHED]
    second = flash.protocol[flash.protocol["device"] == SECOND]
    found = {
        SWEEP: [flash.handout],
        "the shapes of the FlashAttention-3 paper": [flash.paper],
        BOARD: [flash.leaderboard, first],
        BOARD_SECOND: [flash.second["flash"], second],
    }
    columns = ["implementation", "ms", "run"]
    made = {name: pd.concat([one[columns] for one in tables if len(one)] or [tables[0][columns]])
            for name, tables in found.items()}  # fmt: skip
    return {name: rows.dropna(subset=["ms"]) for name, rows in made.items()}


def commits(rows: pd.DataFrame, runs: pd.DataFrame) -> tuple[str, ...]:
    """The commits that measured ours, oldest run first."""
    own = sorted(set(pick(rows, implementation=OURS)["run"]))
    if not own:
        return ()
    used = runs.loc[own]
    return tuple(dict.fromkeys(commit for commit in used["git"] if commit))


def sentence(flash: Flash) -> str:
    """Which code of ours each part is of; "" where it is one. And whether a shape of the sweep
    mixes runs."""
    said = []
    found = {name: commits(rows, flash.runs) for name, rows in parts(flash).items()}
    found = {name: some for name, some in found.items() if some}
    if len({commit for some in found.values() for commit in some}) > 1:
        told = [f"{name} {', '.join(f'`{one}`' for one in some)}" for name, some in found.items()]
        said.append(
            f"Ours is not the same code everywhere, by commit: {'; '.join(told)}. Its times are "
            "compared within a part, but for those of the two GPUs; counters and errors are "
            "counted apart from times."
        )
    timed = flash.handout.dropna(subset=["ms"])
    runs = timed.groupby(["dtype", "head_dim", "seq_len"])["run"].nunique()
    mixed = int((runs > 1).sum())
    if mixed:
        said.append(f"In {mixed} of the sweep's {len(runs)} shapes the implementations are of more "
                    "than one run.")  # fmt: skip
    return " ".join(said)


def machines(flash: Flash) -> Markdown:
    """Whether the two machines were measured with the same code of ours."""
    first, second = (commits(parts(flash)[name], flash.runs) for name in (BOARD, BOARD_SECOND))
    if not (first and second) or first == second:
        return Markdown("")
    one, other = (", ".join(f"`{commit}`" for commit in some) for some in (first, second))
    return Markdown(
        f"On the {flash.short} ours is of commit {one}, on the {style.device_name(SECOND)} of "
        f"{other}: where they differ by little, the code may be why."
    )


def host(flash: Flash) -> str:
    """What ours costs the host at the leaderboard's shape, beside cuDNN and beside the sweep."""
    times = {pass_: _both(flash.leaderboard, pass_) for pass_ in HOST}
    if None in times.values():
        return ""
    sweep, board = (commits(parts(flash)[name], flash.runs) for name in (SWEEP, BOARD))
    later = "" if sweep == board else f", measured at commit {listed(_quoted(board))}"
    told = [f"{HOST[pass_]} {style.digits(ours)} and {style.digits(cudnn)} ms"
            for pass_, (ours, cudnn) in times.items()]  # fmt: skip
    text = (
        f"At the leaderboard's shape{later}, the host needs for ours and for cuDNN {listed(told)}"
    )
    if later:
        text += _since(flash, times)
    return f"{text}."


def _since(flash: Flash, times: dict) -> str:
    """Whether the host's part is less than in a sweep from before plans.py, and our reading."""
    short = pick(flash.handout, dtype="bf16", head_dim=64, seq_len=SHORTEST)
    before = {pass_: _both(short, pass_) for pass_ in HOST}
    ours = pick(short.dropna(subset=["ms_host"]), implementation=OURS)["run"]
    if None in before.values() or max(flash.runs.loc[ours, "started"]) > PLANNED:
        return ""
    if not all(times[p][0] / times[p][1] < before[p][0] / before[p][1] for p in HOST):
        return ""
    told = [f"{HOST[p]} {times[p][0] / times[p][1]:.2f} times cuDNN's and not "
            f"{before[p][0] / before[p][1]:.2f}" for p in HOST]  # fmt: skip
    return (f": {listed(told)} as in the sweep. Between the two, ours began to work out a "
            f"launch's arguments once a shape ({PLANS}); that this is the reason is our "
            "reading")  # fmt: skip


def _both(rows: pd.DataFrame, pass_: str) -> tuple[float, float] | None:
    """The host's milliseconds for ours and for cuDNN."""
    found = [timed_row(rows.dropna(subset=["ms_host"]), implementation=name, pass_=pass_)
             for name in (OURS, CUDNN)]  # fmt: skip
    return None if None in found else tuple(float(row.ms_host) for row in found)


def _quoted(names: tuple[str, ...]) -> list[str]:
    return [f"`{name}`" for name in names]
