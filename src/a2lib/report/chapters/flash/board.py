"""Beside the public leaderboard of 2025: by its own protocol, on the GPU it ran on, and why so."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash import shapes
from a2lib.report.chapters.flash.protocol import NEAR_LIMIT, row_of
from a2lib.report.chapters.flash.rows import SECOND, Flash, subject
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import LEVEL, OURS, ceilings, copy_bandwidth, pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

BOTH = (data.PUBLISHED, SECOND)


def board(flash: Flash) -> Markdown:
    """Whether ours beats the public best by the board's own protocol, on which GPU, and why so."""
    best = flash.best_public()
    device, mean = _by_the_board(flash)
    if mean is None:
        return Markdown(
            f"The best verified public entry is {best:g} ms on an H100, a mean over some seconds "
            "of compiled code. Ours by the same protocol is not measured yet, and a burst "
            "is not comparable with it."
        )
    text = (f"By that protocol ours takes **{style.digits(mean)} ms** on one "
            f"{style.device_name(device)} and {_outcome(mean, best)} the best verified entry "
            f"({best:g} ms, on an H100): {_verdict(mean, best)}.")  # fmt: skip
    if device != SECOND:
        return Markdown(
            f"{text} An H200 has the multiprocessors of an H100 and faster memory, and no H100 was "
            "measured, so the GPUs differ."
        )
    return Markdown(" ".join([text, *_why(flash, mean, best)]))


def in_short(flash: Flash) -> str:
    """Ours by the board's protocol beside the public best, a sentence; "" where not measured."""
    device, mean = _by_the_board(flash)
    if mean is None:
        return ""
    best = flash.best_public()
    text = (f"By the public leaderboard's own protocol, ten seconds without a pause, it takes "
            f"{style.digits(mean)} ms on an {_short(device)}; the best "
            f"verified entry took {best:g} ms on an H100, so ours ")  # fmt: skip
    text += f"{_outcome(mean, best)} it"
    burst, last = (row_of(flash, protocol, device) for protocol in ("burst", "sustained"))
    if mean > LEVEL * best and burst is not None and burst["ms_mean"] <= LEVEL * best:
        text += f". In a burst the mean there is {style.digits(burst['ms_mean'])} ms"
        if last is not None and last["power_w"] >= NEAR_LIMIT * flash.sheet("power_limit", device):
            text += "; ten seconds bring the GPU to its power limit"
    return f"{text}."


def machines(flash: Flash, caption: str, name: str) -> Table:
    """The two machines beside each other at the leaderboard's shape, and what they do plainly.

    Times are means of forward and backward, in ms, but for eager's, a median.
    """
    labels = {"burst": "burst", "sustained": "last of ten seconds", "board": "board's protocol"}
    timed = pick(flash.protocol, protocol="board")["implementation"].unique()
    names = {"board": LOOKS.order(timed)}
    lines = [[f"{LOOKS.short(one)}, {words}", *_pair(
        row_of(flash, protocol, device, one) for device in BOTH)]
        for protocol, words in labels.items() for one in names.get(protocol, [OURS])]  # fmt: skip
    eager = (timed_row(pick(rows, pass_="end_to_end"), implementation="eager")
             for rows in _leaderboards(flash))
    medians = (None if row is None else {"ms_mean": row.ms} for row in eager)
    lines.append(["eager, burst", *_pair(medians)])
    lines.append(["best verified public entry", MISSING, f"{flash.best_public():g}", MISSING])
    lasts = [row_of(flash, "sustained", device) for device in BOTH]
    for words, column in (("clock in that last second (MHz)", "sm_mhz"), ("power (W)", "power_w")):
        cells = [MISSING if last is None or pd.isna(last[column]) else f"{last[column]:.0f}"
                 for last in lasts]  # fmt: skip
        lines.append([words, *cells, MISSING])
    plain = (flash.ceiling_rows, flash.second["ceiling"])
    for words, rate in (("bf16 product (TFLOP/s)", lambda rows: ceilings(rows).get("bf16")),
                        ("device copy (TB/s)", copy_bandwidth)):  # fmt: skip
        lines.append([words, *_pair({"ms_mean": rate(rows)} for rows in plain)])
    columns = ["", *map(_short, BOTH), "H100 / H200"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def behind(flash: Flash) -> pd.DataFrame:
    """The rows of machines(): those of every protocol, eager's, and of the plain operations."""
    eager = (pick(rows, implementation="eager", pass_="end_to_end")
             for rows in _leaderboards(flash))
    tables = [flash.protocol, *eager, flash.ceiling_rows, flash.second["ceiling"]]
    return pd.concat([rows[["run", "file"]] for rows in tables], ignore_index=True)


def memory_matters(flash: Flash) -> Markdown:
    """What the slower memory of the second machine costs whom, by the board's protocol."""
    copies = [copy_bandwidth(rows) for rows in (flash.ceiling_rows, flash.second["ceiling"])]
    found = {}
    for name in (OURS, "sdpa_cudnn", "compile"):
        rows = [row_of(flash, "board", device, name) for device in BOTH]
        if all(row is not None for row in rows):
            found[name] = rows[1]["ms_mean"] / rows[0]["ms_mean"]
    if None in copies or OURS not in found or "compile" not in found:
        return Markdown("")
    others = [f"{subject(name)} {ratio:.2f}" for name, ratio in found.items() if name != "compile"]
    return Markdown(
        f"The GPUs differ in memory: a copy on the {_short(SECOND)} reaches "
        f"{copies[1] / copies[0]:.2f} of the rate. `torch.compile`, which moves $N \\times N$ "
        f"matrices, takes {found['compile']:.2f} times as long there, {listed(others)} times."
    )


def _leaderboards(flash: Flash) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of that board's shape, of both machines."""
    return flash.leaderboard, shapes.leaderboard(flash.second["flash"])


def _by_the_board(flash: Flash) -> tuple[str, float | None]:
    """The device whose figure is set beside the board's, an H100 where there is one, and ours."""
    for device in (SECOND, data.PUBLISHED):
        row = row_of(flash, "board", device)
        if row is not None and not pd.isna(row["ms_mean"]):
            return device, float(row["ms_mean"])
    return data.PUBLISHED, None


def _why(flash: Flash, mean: float, best: float) -> list[str]:
    """On the board's GPU: what the protocol, the power and the code have in our figure."""
    burst, last = (row_of(flash, protocol, SECOND) for protocol in ("burst", "sustained"))
    cudnn, said = row_of(flash, "board", SECOND, "sdpa_cudnn"), []
    if burst is not None and mean > LEVEL * burst["ms_mean"]:
        text = (f"A burst has a mean of {style.digits(burst['ms_mean'])} ms there, "
                f"{_beside(burst['ms_mean'], best)} the entry")  # fmt: skip
        if last is not None and _level(mean, last["ms_mean"]):
            text += (f"; ten seconds of our own timing end at {style.digits(last['ms_mean'])}, "
                     "level with the board's. So what slows ours is the length of the run and not "
                     "the way the board calls it")  # fmt: skip
        said.append(f"{text}.")
    if last is not None and not pd.isna(last["power_w"]):
        said.append(_power(flash, burst, last))
    if mean > LEVEL * best:
        said.append("Clock and power of the entry's machine are not public, so how much of the "
                    "difference is the machine's is open.")  # fmt: skip
        if cudnn is not None and cudnn["ms_mean"] < best / LEVEL:
            said.append(f"Code can do better: cuDNN takes {style.digits(cudnn['ms_mean'])} ms by "
                        "the same protocol on the same GPU.")  # fmt: skip
    else:
        said.append("The two H100s are different machines.")
    return said


def _power(flash: Flash, burst, last) -> str:
    """Power and clock of the last second on the board's GPU, the clock beside the burst's."""
    limit, row = flash.sheet("power_limit", SECOND), flash.sheet_row("power_limit", SECOND)
    at = "at" if last["power_w"] >= NEAR_LIMIT * limit else "below"
    text = f"The GPU is then {at} its power limit ({last['power_w']:.0f} of "
    text += f"[{limit:.0f} W]({row.address}))"
    if burst is None or pd.isna(burst["sm_mhz"]) or pd.isna(last["sm_mhz"]):
        return f"{text}."
    text += (f", and its clock reads {last['sm_mhz']:.0f} MHz, in the burst "
             f"{burst['sm_mhz']:.0f}")  # fmt: skip
    if not _level(*(one["ms_mean"] * one["sm_mhz"] for one in (burst, last))):
        text += "; a reading is of a moment, and the time does not follow it in proportion"
    return f"{text}."


def _pair(rows) -> list[str]:
    """Two cells of `ms_mean` and the second over the first; rows may be None."""
    values = [float("nan") if row is None or row["ms_mean"] is None else float(row["ms_mean"])
              for row in rows]  # fmt: skip
    cells = [MISSING if value != value else style.digits(value) for value in values]
    ratio = values[1] / values[0]
    return [*cells, MISSING if ratio != ratio else f"{ratio:.2f}"]


def _level(one: float, other: float) -> bool:
    return max(one, other) <= LEVEL * min(one, other)


def _outcome(mean: float, best: float) -> str:
    if _level(mean, best):
        return "is level with"
    return "beats" if mean < best else "does not beat"


def _beside(mean: float, best: float) -> str:
    if _level(mean, best):
        return "level with"
    return "below" if mean < best else "above"


def _verdict(mean: float, best: float) -> str:
    if mean < best:
        return f"{best / mean:.2f} times as fast"
    return f"{mean / best:.2f} times its time"


def _short(device: str) -> str:
    return style.device_name(device).split()[1]
