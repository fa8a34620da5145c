"""What the library set out to reach, as ratios of rows: met, missed, or not measured."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.ddp.rows import MAIN, Ddp, name, time
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

# What is held against what, and the most that the ratio may be.
ALONE_FP32, ALONE_BF16, LAUNCHED, CAPTURED = 1.10, 1.05, 0.70, 0.55


def ratios(c: Ddp) -> list[tuple]:
    """(what, our row, against what, the ratio, that of our step without communication, whether
    both are of one run, the limit)."""
    captured, sixteen = c.best(capture=True), c.best(capture=True, sent_dtype="bf16")
    launched, torch = c.best(), c.row("torch_ddp", 25)
    alone = "the captured step without communication"
    peer = "PyTorch's DDP, launched"
    return [
        ("captured, fp32", captured, alone, *_over_alone(captured), ALONE_FP32),
        ("captured, bf16", sixteen, alone, *_over_alone(sixteen), ALONE_BF16),
        *_updating(c, alone),
        ("launched, fp32", launched, peer, *_over(launched, torch), LAUNCHED),
        ("captured, fp32", captured, peer, *_over(captured, torch), CAPTURED),
    ]


def _updating(c: Ddp, alone: str) -> list[tuple]:
    found = [(dtype, c.best(capture=True, sent_dtype=dtype, updating=True), limit)
             for dtype, limit in (("fp32", ALONE_FP32), ("bf16", ALONE_BF16))]  # fmt: skip
    return [(f"captured, {dtype}, updating", row, alone, *_over_alone(row), limit)
            for dtype, row, limit in found if row is not None]  # fmt: skip


def _over_alone(row) -> tuple[float | None, float | None, bool]:
    return (None, None, True) if row is None else (float(row.ms) / float(row.ms_without), 1.0, True)


def _over(row, other) -> tuple[float | None, float | None, bool]:
    if row is None or other is None:
        return None, None, True
    least = float(row.ms_without) / float(other.ms)
    return float(row.ms) / float(other.ms), least, row.run == other.run


def table(c: Ddp, caption: str, label: str) -> Table:
    lines = []
    for what, row, against, ratio, least, together, limit in ratios(c):
        verdict = MISSING
        if ratio is not None:
            verdict = ("met" if ratio <= limit else "missed") + ("" if together else ", two runs")
        lines.append([what, f"{limit:.2f}",
                      *(MISSING if r is None else f"{r:.3f}" for r in (ratio, least)), verdict,
                      against, MISSING if row is None else name(row)])  # fmt: skip
    columns = ["ours", "at most", "ratio", "nothing sent", "", "against", "the fastest"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, keys=1)


def sentence(c: Ddp) -> Markdown:
    """How many are met, and what the host has to do with the launched ones."""
    known = [(against, ratio, least, limit, what)
             for what, _, against, ratio, least, _, limit in ratios(c) if ratio is not None]
    found = [(ratio, limit) for _, ratio, _, limit, _ in known]
    if not found:
        return Markdown(c.not_yet("whether the targets are met"))
    met = sum(ratio <= limit for ratio, limit in found)
    text = f"{met} of the {len(found)} targets that are measured are met."
    beyond = [f"{least:.3f} ({what}, at most {limit:.2f})"
              for _, _, least, limit, what in known if least > limit]  # fmt: skip
    if beyond:
        text += (
            f" Nothing that updates after backward can meet {len(beyond)} of them: our step that "
            f"sends nothing is {listed(beyond)} of PyTorch's. They were set beside a host on which "
            "PyTorch's step took longer."
        )
    torch, best = c.row("torch_ddp", 25, model=MAIN), c.best()
    if torch is not None and best is not None and not pd.isna(torch.ms_host):
        text += (
            f" Launched, the host takes {time(best.ms_host)} ms to issue our step and "
            f"{time(torch.ms_host)} ms to issue that of PyTorch's wrapper, of {time(best.ms)} "
            f"and {time(torch.ms)} ms: where these are close, it is the host that is timed, and "
            "another host gives another ratio."
        )
    return Markdown(text)
