"""The notebook's text tables of protocols, errors and counters; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from a2lib.experiments.flash.protocols import PROTOCOLS
from a2lib.experiments.flash.view import implementations, shape_of
from a2lib.experiments.harness.tables import table

Row = Mapping[str, str]
# first column of the table -> column of the store
_TIMES = {"median, ms": "ms", "mean, ms": "ms_mean", "MHz": "sm_mhz", "W": "power_w"}


def protocols(rows: Sequence[Row]) -> str:
    """A line for each protocol and implementation; two where it goes on for seconds."""
    body = []
    for shape in dict.fromkeys(shape_of(row) for row in rows):
        for protocol in PROTOCOLS:
            mine = [r for r in rows if r["protocol"] == protocol and shape_of(r) == shape]
            for name in implementations(mine):
                seconds = sorted(
                    (r for r in mine if r["implementation"] == name), key=lambda r: int(r["second"])
                )
                for row in dict.fromkeys((0, len(seconds) - 1)):
                    body.append([str(shape), *_protocol_line(seconds[row], len(seconds) > 1)])
    header = ["shape", "protocol", "implementation", *_TIMES, ""]
    return table(body, header, "The leaderboard's shape by each protocol, ms.")


def _protocol_line(row: Row, of_many: bool) -> list[str]:
    protocol = f"{row['protocol']}, second {row['second']}" if of_many else row["protocol"]
    if row["status"] != "ok":
        values = [row["status"], *[""] * (len(_TIMES) - 1)]
    else:
        values = [f"{float(row[c]):.4g}" if row[c] else "-" for c in _TIMES.values()]
    return [protocol, row["implementation"], *values, row["note"]]


def accuracy(rows: Sequence[Row]) -> str:
    """The relative error of each tensor, and the reason where there is none."""
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        case = (shape_of(row), int(row["score_scale"]), row["implementation"])
        groups.setdefault(case, {})[row["tensor"]] = row
    cases = list(dict.fromkeys((shape, scale) for shape, scale, _ in groups))
    body = []
    for shape, scale in sorted(cases, key=str):
        present = [r for r in rows if (shape_of(r), int(r["score_scale"])) == (shape, scale)]
        for name in implementations(present):
            found = groups[shape, scale, name]
            cells = [_error(found.get(tensor)) for tensor in ("o", "dq", "dk", "dv")]
            notes = dict.fromkeys(r["note"] for r in found.values() if r["note"])
            body.append([str(shape), str(scale), name, *cells, "; ".join(notes)])
    header = ["shape", "scores times", "implementation", "o", "dq", "dk", "dv", ""]
    return table(body, header, "Errors of the output and the gradients against float64.")


def counters(rows: Sequence[Row]) -> str:
    """A line for each kernel counted: bytes by level, what was busy."""
    header = ["shape", "implementation", "pass", "kernel", "device MB", "L2 MB", "tensor %"]
    body = []
    for row in rows:
        start = [str(shape_of(row)), row["implementation"], row["pass"]]
        if row["status"] != "ok":
            body.append([*start, row["status"], *[""] * 6, row["note"]])
            continue
        sizes = [f"{int(row[c]) / 1e6:.4g}" for c in ("device_bytes", "l2_bytes")]
        shares = (row[f"{what}_percent"] for what in ("tensor", "exp", "issue", "warps"))
        body.append([*start, row["kernel"][:40], *sizes, *shares, ""])
    header += ["exp %", "issue %", "warps %", ""]
    return table(body, header, "What each kernel moves, and what was busy.")


def _error(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{float(row['error']):.2e}" if row["error"] else row["status"]
