"""What the rows do not hold: older runs, shapes without the GPU's time, a GPU never measured."""

from __future__ import annotations

from a2lib.report import data, style
from a2lib.report.chapters.flash import ages, protocol
from a2lib.report.chapters.flash.rows import DTYPES, SECOND, Flash, span
from a2lib.report.chapters.flash.shapes import handout, paper
from a2lib.report.style import listed
from a2lib.report.tables import Markdown


def sentence(flash: Flash) -> Markdown:
    """What is missing behind this page's figures, or "" where nothing is."""
    parts = [_without_graph(flash), _dirty(flash), ages.sentence(flash), _no_h100(flash)]
    return Markdown(" ".join(part for part in parts if part))


def _without_graph(flash: Flash) -> str:
    """Timed rows without the GPU's own time: which shapes, and of which commits."""
    timed = flash.rows.dropna(subset=["ms"])
    lacking = timed[timed["ms_graph"].isna()]
    if not len(lacking):
        return ""
    words = []
    for name, rows in (("sweep", handout(lacking)), ("paper", paper(lacking))):
        if not len(rows):
            continue
        if name == "paper":
            words.append(f"{len(rows)} at the shapes of the FlashAttention-3 paper")
        else:
            dtypes = [dtype for dtype in DTYPES if dtype in set(rows["dtype"])]
            sizes = listed([str(d) for d in sorted(rows["head_dim"].unique())])
            words.append(f"{len(rows)} of the handout's sweep ({' and '.join(dtypes)}, heads of "
                         f"{sizes}, {span(rows['seq_len'])})")  # fmt: skip
    text = (f"Of {len(timed):,} timed rows {len(lacking):,} have no GPU time apart: "
            f"{listed(words) if words else 'other shapes'}. ")  # fmt: skip
    refused = lacking["note"].fillna("").str.startswith("no graph:").sum()
    if refused:
        text += f"In {refused} of them the call could not be captured in a graph. "
    runs = sorted(set(lacking.loc[~lacking["note"].fillna("").str.startswith("no graph:"), "run"]))
    if runs:
        commits = list(dict.fromkeys(flash.runs.loc[runs, "git"]))
        text += ("They are of older runs, which measured the time as called alone (commit "
                 f"{', '.join(f'`{commit}`' for commit in commits)}); the code has changed since, "
                 "and they wait to be measured again.")  # fmt: skip
    return text.strip()


def _dirty(flash: Flash) -> str:
    rows = flash.measured()
    if not len(rows):
        return ""
    used = flash.runs.loc[sorted(set(rows["run"]))]
    dirty = used[used["git"].str.endswith("-dirty")]
    if not len(dirty):
        return ""
    n = int(rows["run"].isin(dirty.index).sum())
    return (f"{n:,} of {len(rows):,} rows name a commit that ends in `-dirty`: the code differed "
            "from that commit. The lab log (`dev/log.md`) says which code it was.")  # fmt: skip


def _no_h100(flash: Flash) -> str:
    if protocol.row_of(flash, "board", SECOND) is not None:
        return ""
    name = style.device_name(data.PUBLISHED)
    return f"No H100 was measured; every figure of ours is of one {name}."
