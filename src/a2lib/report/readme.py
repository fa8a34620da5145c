"""The picture of README.md, which is also the preview of the book's pages, from the committed rows.

`make html` calls `write`; to draw it anew after a change of its looks, remove the file first.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from PIL import Image

from a2lib.paths import ROOT
from a2lib.report import data, style
from a2lib.report.panels import places
from a2lib.report.units import digits

PICTURE = ROOT / "book" / "_static" / "flash-e2e.png"
KEY = "GPU time in ms by tokens"  # the PNG's text that holds the points drawn
# Label, colour and marker, those of the chapter; the peers are PyTorch's.
LINES = {
    "eager": ("PyTorch eager", "#444444", "s"),
    "compile": ("torch.compile", "#a86f00", "D"),
    "sdpa_flash": ("FlashAttention-2 (SDPA)", "#0072b2", "^"),
    "flex": ("FlexAttention", "#b0558a", "X"),
    "a2lib": ("a2lib", "#d55e00", "o"),
    "sdpa_cudnn": ("cuDNN (SDPA)", "#00825f", "v"),
}
LABEL_PT = 14  # from one label's height to the next


def write(file: Path = PICTURE, root: Path = ROOT / "data") -> Path:
    """Draw the picture, unless the points in ``file`` are those of the rows in ``root`` already.

    Raises ReportError where a line has no time.
    """
    times = gpu_times(root)
    if not file.exists() or plotted(file) != times:
        # 1200 by 630 pixels, the size of a preview.
        chart = style.Chart(partial(_draw, times=times), width=7.5, height=3.9375, room=0.32)
        [ax] = chart.figure.axes
        points = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
        chart.save(file, dpi=160, metadata={"Software": None, KEY: json.dumps(points)})
    return file


def plotted(file: Path) -> dict[str, list[list[float]]]:
    """The points of each line of a picture: tokens and milliseconds."""
    with Image.open(file) as picture:
        return json.loads(picture.info.get(KEY, "{}"))


def gpu_times(root: Path) -> dict[str, list[list[float]]]:
    """Tokens and GPU time in ms (replayed from a CUDA graph) of each line on the published GPU."""
    rows = data.load("flash", [root])
    rows = rows[
        (rows["device"] == data.PUBLISHED)
        & (rows["dtype"] == "bf16")
        & rows["causal"]
        & (rows["batch"] == 1)
        & (rows["heads"] == 1)
        & (rows["head_dim"] == 64)
        & (rows["pass"] == "end_to_end")
        & rows["ms_graph"].notna()
    ].sort_values("seq_len")
    found = {}
    for name in LINES:
        line = rows[rows["implementation"] == name]
        if line.empty:
            raise data.ReportError(f"{root}: no GPU time of {name}, so README.md has no picture")
        found[name] = line[["seq_len", "ms_graph"]].astype(float).to_numpy().tolist()
    return found


def _draw(figure, times):
    ax = figure.subplots()
    for name, points in times.items():
        _, colour, marker = LINES[name]
        ours = name == "a2lib"
        ax.plot(
            *zip(*points, strict=True),
            label=name,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=2.4 if ours else 1.4,
            zorder=3 if ours else 2,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({tokens for points in times.values() for tokens, _ in points})
    ax.set_xticks(lengths, [f"{n / 1024:.0f}k" if n >= 1024 else f"{n:.0f}" for n in lengths])
    ax.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    ax.set_xlabel("tokens")
    what = "Causal attention, forward and backward, one head of 64, bf16"
    ax.set_title(f"{what}:\nGPU time in ms on one {style.device_name(data.PUBLISHED)}", loc="left")
    return lambda: _name_lines(figure, ax, times)


def _name_lines(figure, ax, times):
    """Write each line's name and last time at its right end, one above the other."""
    pt, panel = figure.dpi / 72, ax.get_window_extent()
    ends = {name: ax.transData.transform(points[-1])[1] for name, points in times.items()}
    heights = places(list(ends.values()), LABEL_PT * pt, panel.y0, panel.y1)
    for (name, y), height in zip(ends.items(), heights, strict=True):
        label, colour, _ = LINES[name]
        ax.annotate(
            f"{label}  {digits(times[name][-1][1])} ms",
            times[name][-1],
            (20, (height - y) / pt),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
            fontweight="bold" if name == "a2lib" else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


if __name__ == "__main__":
    write()
