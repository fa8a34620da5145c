"""One shape under three protocols: a burst, seconds on end, and the public leaderboard's own."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, style
from a2lib.report.chapters.flash.rows import Flash, subject
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import LEVEL, OURS, level, pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

NEAR_LIMIT = 0.97  # of the stated power limit: from here on it is taken to act on the clock
PROTOCOLS = ("burst", "sustained", "board")


def rows_of(flash: Flash, protocol: str, device: str = data.PUBLISHED) -> pd.DataFrame:
    """The rows of one protocol and device with a time, ours and the peers'."""
    return pick(flash.protocol, protocol=protocol, device=device).dropna(subset=["ms"])


def row_of(flash: Flash, protocol: str, device: str = data.PUBLISHED, implementation: str = OURS):
    """The row end to end of one implementation, of `sustained` its last second; None without."""
    rows = pick(rows_of(flash, protocol, device), implementation=implementation)
    return _last(pick(rows, pass_="end_to_end"))


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
    """What seconds on end do to time, clock and power: from the burst to the last second, by peer.

    The test of the power limit: who draws less than that keeps his time.
    """
    rows, words, times, free = seconds(flash), [], {}, {}
    limit = flash.sheet("power_limit")
    for name in LOOKS.order(rows["implementation"].unique()):
        burst, last = row_of(flash, "burst", implementation=name), _last(
            pick(rows, implementation=name))  # fmt: skip
        if burst is None or last["second"] < 1:
            continue
        times[name] = (burst["ms"], last["ms"])
        words.append(f"{subject(name)} {_at(burst)} to {_at(last)}, {_change(burst, last)}")
        if last["power_w"] < NEAR_LIMIT * limit:
            free[name] = last["ms"] <= LEVEL * burst["ms"]
    if not words:
        return Markdown("What seconds of the same work do to clock and time is not measured yet.")
    text = (f"On the {flash.short}, from the burst to the last second, by the medians: "
            f"{'; '.join(words)}.")  # fmt: skip
    ours, cudnn = times.get(OURS), times.get("sdpa_cudnn")
    if ours and cudnn:
        before, after = (one / other for one, other in zip(ours, cudnn, strict=True))
        text += f" So ours takes {before:.2f} times cuDNN's time in the burst and {after:.2f} "
        text += "times at the end."
    if free:
        names = listed([subject(name) for name in free])
        what = "is not slower at the end, as the power limit predicts" if all(free.values()) else (
            "is slower at the end all the same, so the power limit is not the whole reason")
        text += f" What stays below {limit:.0f} W ({names}) {what}."
    return Markdown(text)


def again(flash: Flash) -> Markdown:
    """The two bursts of ours beside each other: that of the answer and that of the protocols."""
    table = row_of(flash, "burst")
    answer = timed_row(flash.leaderboard, implementation=OURS, pass_="end_to_end")
    if table is None or answer is None:
        return Markdown("")
    same = "their ranges overlap" if level(table, answer) else "their ranges are apart"
    return Markdown(
        "The burst of the protocols and that of the chapter's answer are two measurements of ours, "
        f"{_spread(table, 'burst')} ms and {_spread(answer._asdict(), 'burst')} ms: {same}."
    )


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
    found = [f"{row[column]:.0f} {unit}" for column, unit in (("sm_mhz", "MHz"), ("power_w", "W"))
             if not pd.isna(row[column])]  # fmt: skip
    return f"{style.digits(row['ms'])} ms" + (f" ({', '.join(found)})" if found else "")


def _change(burst, last) -> str:
    change = last["ms"] / burst["ms"]
    if max(change, 1 / change) <= LEVEL:
        return "level"
    return f"{100 * abs(change - 1):.0f} % {'slower' if change > 1 else 'faster'}"
