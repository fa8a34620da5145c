"""Which wrapper to use: the fastest of the rows, launched and captured, as one would type it."""

from __future__ import annotations

from a2lib.report import metrics
from a2lib.report.chapters.ddp.host import ALONE
from a2lib.report.chapters.ddp.rows import UPDATING, Ddp, name, spread, time
from a2lib.report.chapters.measured import HOST
from a2lib.report.style import listed
from a2lib.report.tables import Markdown

_CLASSES = {"naive": "NaiveDDP(module)", "flat": "FlatDDP(module)", "overlapped": "DDP(module)"}


def code(row) -> str:
    """The wrapper of a row of ours, as it is made."""
    if row.wrapper in _CLASSES:
        return _CLASSES[row.wrapper]
    words = ["module", str(int(row.bucket_mb))]
    words += ['communication="copy_engines"'] * (row.carrier == "copy_engines")
    words += ["communication_dtype=torch.bfloat16"] * (row.sent_dtype == "bf16")
    return f"BucketedDDP({', '.join(words)})"


def sentence(c: Ddp) -> Markdown:
    """What to type, and what else is as fast."""
    text = [part for part in (_captured(c), _launched(c)) if part]
    if not text:
        return Markdown(c.not_yet("which wrapper is the fastest"))
    return Markdown(f"**Which to use**, of what is measured. {' '.join(text)}")


def _captured(c: Ddp) -> str:
    best = {updating: c.best(capture=True, updating=updating) for updating in (True, False)}
    found = [row for row in best.values() if row is not None]
    if not found:
        return ""
    first = min(found, key=lambda row: row.ms)
    text = f"Captured in a CUDA graph, `{code(first)}`"
    if first.wrapper == UPDATING:
        text += " with `optimizer.overlapping(ddp)` around backward"
    text += f": {time(first.ms)} ms"
    rest = []
    if first.wrapper == UPDATING and best[False] is not None:
        rest.append(f"{time(best[False].ms)} with the update after backward, as clipping by the "
                    "norm of all gradients wants it")  # fmt: skip
    if first.carrier == "copy_engines":
        nccl = c.row(first.wrapper, int(first.bucket_mb), capture=True)
        if nccl is not None:
            rest.append(f"{time(nccl.ms)} by NCCL, for GPUs of several hosts")
    low = c.best(capture=True, sent_dtype="bf16", updating=first.wrapper == UPDATING)
    if low is not None:
        rest.append(f"{time(low.ms)} with gradients sent in bf16, which rounds them")
    return f"{text}; {listed(rest)}." if rest else f"{text}."


def _launched(c: Ddp) -> str:
    best = c.best()
    if best is None:
        return ""
    rows = c.of(best.model, False, sent_dtype="fp32").dropna(subset=["ms"])
    level = [row for row in rows.itertuples()
             if row.Index != best.Index and metrics.level(row, best)]  # fmt: skip
    text = f"Launched, `{code(best)}`: {time(best.ms)} ms ({spread(best)})"
    torch = c.row("torch_ddp", 25)
    if torch is not None:
        text += f", {time(torch.ms)} ({spread(torch)}) in PyTorch's DDP"
    if level:
        text += f"; level with it: {'; '.join(map(name, level))}"
    if best.ms_host >= HOST * best.ms:
        text += f". The host takes {time(best.ms_host)} ms to issue it, so "
        many = any(row.wrapper in ALONE for row in level)
        text += (
            "it is the host that is timed, and which of these sends best is not seen"
            if many else "what counts is that messages are few"
        )  # fmt: skip
    return f"{text}."
