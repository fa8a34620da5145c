"""Of which commit ours is in each part of the chapter, and what is set side by side across them."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash.rows import SECOND, Flash, span
from a2lib.report.metrics import OURS, pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import Markdown

CUDNN = "sdpa_cudnn"
HOST = {"forward": "forward", "end_to_end": "end to end"}
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
    """Which code of ours each part is of; "" where it is one. And which runs the sweep mixes."""
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
    return " ".join(filter(None, (*said, _mixed(flash))))


def _mixed(flash: Flash) -> str:
    """Of how many runs the implementations of one pass and the passes of one shape are."""
    timed, shape = flash.handout.dropna(subset=["ms"]), ["dtype", "head_dim", "seq_len"]
    passes = timed.groupby([*shape, "pass"])["run"].nunique()
    across = timed.groupby([*shape, "implementation"])["run"].nunique() > 1
    shapes = across.groupby(level=shape).any()
    mixed = passes[passes > 1]
    if not (len(mixed) or shapes.any()):
        return ""
    text = "In each of the sweep's shapes and passes the implementations are of one run"
    if len(mixed):
        text = (f"In {len(mixed)} of the sweep's {len(passes)} shapes and passes, at "
                f"{span(mixed.index.get_level_values('seq_len'))}, the implementations are of more "
                "than one run, in the others of one")  # fmt: skip
    if shapes.any():
        text += (f"; in {shapes.sum()} of its {len(shapes)} shapes the passes are of more than one "
                 "run")  # fmt: skip
    return f"{text}."


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
    """What ours costs the host at the leaderboard's shape, beside cuDNN."""
    times = {pass_: _both(flash.leaderboard, pass_) for pass_ in HOST}
    if None in times.values():
        return ""
    told = [f"{HOST[pass_]} {style.digits(ours)} and {style.digits(cudnn)} ms"
            for pass_, (ours, cudnn) in times.items()]  # fmt: skip
    text = f"At the leaderboard's shape the host needs for ours and for cuDNN {listed(told)}"
    if not set(flash.leaderboard["run"]) <= set(flash.handout["run"]):
        text += ", in another run than the sweep's; another host has other times"
    return f"{text}."


def _both(rows: pd.DataFrame, pass_: str) -> tuple[float, float] | None:
    """The host's milliseconds for ours and for cuDNN."""
    found = [timed_row(rows.dropna(subset=["ms_host"]), implementation=name, pass_=pass_)
             for name in (OURS, CUDNN)]  # fmt: skip
    return None if None in found else tuple(float(row.ms_host) for row in found)
