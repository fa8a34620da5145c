"""One shape under three protocols: a burst, seconds on end, and the public leaderboard's own."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash.rows import H100, UNKNOWN, Flash, listed
from a2lib.report.metrics import LEVEL, OURS, pick
from a2lib.report.tables import MISSING, Markdown, Table

PROTOCOLS = {"burst": "burst", "sustained": "sustained", "board": "the board's"}


def rows_of(flash: Flash, protocol: str, device: str = data.PUBLISHED) -> pd.DataFrame:
    """The rows of one protocol and device (or its prefix) with a time, ours and the peers'."""
    rows = pick(flash.protocol, protocol=protocol).dropna(subset=["ms"])
    return rows[rows["device"].astype(str).str.startswith(device)]


def seconds(flash: Flash) -> pd.DataFrame:
    """Rows of the sustained protocol on the published device, end to end: what the figure draws."""
    rows = rows_of(flash, "sustained")
    return rows[rows["pass"] == "end_to_end"]


def table(flash: Flash, caption: str, name: str) -> Table:
    """End to end by implementation: burst, the last sustained second, the board's, with clocks."""
    lines = []
    every = flash.protocol[flash.protocol["pass"] == "end_to_end"].dropna(subset=["ms"])
    for device in sorted(every["device"].unique(), key=lambda slug: slug != data.PUBLISHED):
        here = pick(every, device=device)
        for implementation in style.implementations(here["implementation"]):
            cells = []
            for protocol in PROTOCOLS:
                row = _last(pick(here, implementation=implementation, protocol=protocol))
                cells += [MISSING] * 2 if row is None else [_spread(row, protocol), _clock(row)]
            label = style.SHORT.get(implementation, implementation)
            lines.append([label, style.device_name(device).removeprefix("NVIDIA "), *cells])
    columns = ["", "GPU", "burst (ms)", "MHz", "last second (ms)", "MHz ", "board (ms)", "MHz  "]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def sustained(flash: Flash) -> Markdown:
    """What seconds on end do to time, clock and power, ours from the first second to the last."""
    rows = pick(seconds(flash), implementation=OURS).sort_values("second")
    if len(rows) < 2:
        return Markdown("What seconds of the same work do to clock and time is not measured yet.")
    first, last = rows.iloc[0], rows.iloc[-1]
    change = last["ms"] / first["ms"]
    text = (f"Called without a pause, ours takes {style.digits(first['ms'])} ms in the first "
            f"second and {style.digits(last['ms'])} ms in the last of {len(rows)}")  # fmt: skip
    if not (pd.isna(first["sm_mhz"]) or pd.isna(last["sm_mhz"])):
        text += f", while the clock goes from {first['sm_mhz']:.0f} to {last['sm_mhz']:.0f} MHz"
    if not pd.isna(last["power_w"]):
        text += f" at {last['power_w']:.0f} W"
    if change > LEVEL:
        return Markdown(f"{text}: a long run is {100 * (change - 1):.0f} % slower at its end.")
    if change < 1 / LEVEL:
        return Markdown(f"{text}: a long run is {100 * (1 - change):.0f} % faster at its end.")
    return Markdown(f"{text}: it stays level.")


def board(flash: Flash) -> Markdown:
    """The public best beside our figure by the same protocol, on an H100 where there is one."""
    best = flash.best_public()
    for device in (H100, data.PUBLISHED):
        row = _last(pick(rows_of(flash, "board", device), implementation=OURS,
                         pass_="end_to_end"))  # fmt: skip
        if row is not None and not pd.isna(row["ms_mean"]):
            break
    else:
        return Markdown(
            f"The best verified public entry is {best:g} ms on an H100, a mean over some seconds "
            "of compiled code. Ours by the same protocol is not measured yet, and the burst above "
            "is not comparable with it."
        )
    mean, name = row["ms_mean"], style.device_name(row["device"])
    text = (f"By the public leaderboard's own protocol ours takes **{style.digits(mean)} ms** on "
            f"one {name}, where its best verified entry took {best:g} ms on an H100: ")  # fmt: skip
    text += _verdict(mean, best)
    if not str(row["device"]).startswith(H100):
        text += (". An H200 has the multiprocessors of an H100 and faster memory, and no H100 was "
                 "measured, so the GPUs differ")  # fmt: skip
    else:
        text += ". Both are H100s, in different machines"
    return Markdown(f"{text}.")


def numbers(flash: Flash) -> dict[str, str]:
    """Glued numbers of the three protocols, ours end to end on the published device."""
    found = {}
    for protocol in PROTOCOLS:
        row = _last(pick(rows_of(flash, protocol), implementation=OURS, pass_="end_to_end"))
        value = None if row is None else row["ms_mean" if protocol == "board" else "ms"]
        known = value is not None and not pd.isna(value)
        found[f"protocol_{protocol}"] = f"{style.digits(value)} ms" if known else UNKNOWN
    return found


def peers(flash: Flash) -> Markdown:
    """The board's protocol for every implementation on the published device, in order."""
    rows = rows_of(flash, "board")
    rows = rows[rows["pass"] == "end_to_end"].dropna(subset=["ms_mean"]).sort_values("ms_mean")
    if len(rows) < 2:
        return Markdown("")
    words = [f"{style.look(r.implementation).label} {style.digits(r.ms_mean)} ms"
             for r in rows.itertuples()]  # fmt: skip
    return Markdown(f"By that protocol, on one {flash.device}: {listed(words)}.")


def _verdict(mean: float, best: float) -> str:
    if max(mean, best) <= LEVEL * min(mean, best):
        return "level"
    if mean < best:
        return f"{best / mean:.2f} times as fast"
    return f"{mean / best:.2f} times its time"


def _last(rows: pd.DataFrame):
    return rows.sort_values("second").iloc[-1] if len(rows) else None


def _spread(row, protocol: str) -> str:
    if protocol == "board":
        return MISSING if pd.isna(row["ms_mean"]) else style.digits(row["ms_mean"])
    if pd.isna(row["ms_p20"]) or pd.isna(row["ms_p80"]):
        return style.digits(row["ms"])
    low, high = style.digits(row["ms_p20"]), style.digits(row["ms_p80"])
    return f"{style.digits(row['ms'])} ({low} – {high})"


def _clock(row) -> str:
    return MISSING if pd.isna(row["sm_mhz"]) else f"{row['sm_mhz']:.0f}"
