"""One shape under three protocols: a burst, seconds on end, and the public leaderboard's own."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash.rows import H100, UNKNOWN, Flash, subject
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import LEVEL, OURS, level, pick, timed_row
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
        for implementation in LOOKS.order(here["implementation"]):
            cells = []
            for protocol in PROTOCOLS:
                row = _last(pick(here, implementation=implementation, protocol=protocol))
                cells += [MISSING] * 2 if row is None else [_spread(row, protocol), _clock(row)]
            label = LOOKS.short(implementation)
            lines.append([label, style.device_name(device).removeprefix("NVIDIA "), *cells])
    columns = ["", "GPU", "burst (ms)", "MHz", "last second (ms)", "MHz ", "board (ms)", "MHz  "]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def sustained(flash: Flash) -> Markdown:
    """What seconds on end do to time and clock: from the burst to the last second, by peer."""
    rows, words, times = seconds(flash), [], {}
    for name in LOOKS.order(rows["implementation"].unique()):
        here = pick(rows, implementation=name).sort_values("second")
        burst = _last(pick(rows_of(flash, "burst"), implementation=name, pass_="end_to_end"))
        if burst is None or len(here) < 2:
            continue
        first, last = here.iloc[0], here.iloc[-1]
        times[name] = (burst["ms"], last["ms"])
        words.append(f"{subject(name)} {_at(burst)} to {_at(last)}, {_change(burst, last)}")
        if name == OURS:
            words[-1] += f" ({style.digits(first['ms'])} ms in the first second already)"
    if not words:
        return Markdown("What seconds of the same work do to clock and time is not measured yet.")
    text = f"From the burst to the last second: {'; '.join(words)}."
    ours, cudnn = times.get(OURS), times.get("sdpa_cudnn")
    if ours and cudnn:
        before, after = (one / other for one, other in zip(ours, cudnn, strict=True))
        text += f" So ours takes {before:.2f} times cuDNN's time in the burst and {after:.2f} "
        text += "times at the end."
    power = pick(rows, implementation=OURS).sort_values("second")["power_w"].dropna()
    if ours and len(power):
        text += f" The driver reads {power.iloc[-1]:.0f} W of ours there."
    return Markdown(text)


def again(flash: Flash) -> Markdown:
    """The two bursts on the page beside each other: that of the answer and that of the table."""
    table = _last(pick(rows_of(flash, "burst"), implementation=OURS, pass_="end_to_end"))
    answer = timed_row(flash.leaderboard, implementation=OURS, pass_="end_to_end")
    if table is None or answer is None:
        return Markdown("")
    same = "their ranges overlap" if level(table, answer) else "their ranges are apart"
    return Markdown(
        f"The burst of the table and that of the answer are two measurements of ours, "
        f"{_spread(table, 'burst')} ms and {_spread(answer._asdict(), 'burst')} ms: {same}."
    )


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


def in_short(flash: Flash) -> str:
    """Ours by the board's protocol beside the public best, a sentence; "" where not measured."""
    row = _last(pick(rows_of(flash, "board"), implementation=OURS, pass_="end_to_end"))
    if row is None or pd.isna(row["ms_mean"]):
        return ""
    return (f"By the leaderboard's own, longer protocol it is {style.digits(row['ms_mean'])} ms; "
            f"the best public entry has {flash.best_public():g} ms, on an H100.")  # fmt: skip


def numbers(flash: Flash) -> dict[str, str]:
    """Glued numbers of the three protocols, ours end to end on the published device."""
    found = {}
    for protocol in PROTOCOLS:
        row = _last(pick(rows_of(flash, protocol), implementation=OURS, pass_="end_to_end"))
        value = None if row is None else row["ms_mean" if protocol == "board" else "ms"]
        known = value is not None and not pd.isna(value)
        found[f"protocol_{protocol}"] = f"{style.digits(value)} ms" if known else UNKNOWN
    return found



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


def _at(row) -> str:
    clock = "" if pd.isna(row["sm_mhz"]) else f" at {row['sm_mhz']:.0f} MHz"
    return f"{style.digits(row['ms'])} ms{clock}"


def _change(burst, last) -> str:
    change = last["ms"] / burst["ms"]
    if max(change, 1 / change) <= LEVEL:
        return "level"
    return f"{100 * abs(change - 1):.0f} % {'slower' if change > 1 else 'faster'}"
