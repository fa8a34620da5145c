"""The picture of README.md, from the committed rows.

`make html` calls `write`; to draw it anew after a change of its looks, remove the file first.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
from PIL import Image

from a2lib.paths import ROOT
from a2lib.report import data, style
from a2lib.report.page import pick
from a2lib.report.panels import doubling_axis, name_ends
from a2lib.report.plots import lines, log_values
from a2lib.report.style import Look, Looks
from a2lib.report.units import digits

PICTURE = ROOT / "book" / "_static" / "flash-e2e.png"
KEY = "GPU time in ms by tokens"  # the PNG's text that holds the points drawn
# The looks of the chapter; the peers are PyTorch's.
LINES = Looks(
    eager=Look("PyTorch eager", "#444444", "s"),
    compile=Look("torch.compile", "#a86f00", "D"),
    sdpa_flash=Look("FlashAttention-2 (SDPA)", "#0072b2", "^"),
    flex=Look("FlexAttention", "#b0558a", "X"),
    a2lib=Look("a2lib", "#d55e00", "o", ours=True),
    sdpa_cudnn=Look("cuDNN (SDPA)", "#00825f", "v"),
)


def write(file: Path = PICTURE, root: Path = ROOT / "data") -> Path:
    """Draw the picture, unless the points in ``file`` are those of the rows in ``root`` already.

    Raises ReportError where a line has no time.
    """
    times = gpu_times(root)
    if not file.exists() or plotted(file) != times:
        # 1200 by 630 pixels
        chart = style.Chart(partial(_draw, times=times), width=7.5, height=3.9375)
        chart.save(file, dpi=160, metadata={"Software": None, KEY: json.dumps(times)})
    return file


def plotted(file: Path) -> dict[str, list[list[float]]]:
    """Return the points of each line of a picture: tokens and milliseconds."""
    with Image.open(file) as picture:
        return json.loads(picture.info.get(KEY, "{}"))


def gpu_times(root: Path) -> dict[str, list[list[float]]]:
    """Return tokens and GPU time in ms (of a CUDA graph's replay) of each line, on the published
    GPU. Raises ReportError for a line without a time."""
    rows = data.load("flash", [root])
    one_head = {"dtype": "bf16", "causal": True, "batch": 1, "heads": 1, "head_dim": 64}
    rows = pick(rows, device=data.PUBLISHED, pass_="end_to_end", **one_head)
    rows = rows[rows["ms_graph"].notna()].sort_values("seq_len")
    times = {}
    for name in LINES:
        line = rows[rows["implementation"] == name]
        if line.empty:
            raise data.ReportError(f"{root}: no GPU time of {name}, so README.md has no picture")
        times[name] = line[["seq_len", "ms_graph"]].astype(float).to_numpy().tolist()
    return times


def _draw(figure, times):
    """Draw the lines, with the name and the last time of each at its end."""
    ax = figure.subplots()
    rows, looks = [], Looks()
    for name, points in times.items():
        rows.append(pd.DataFrame(points, columns=["tokens", "ms"]).assign(name=name))
        label = f"{LINES[name].label}  {digits(points[-1][1])} ms"
        looks[name] = replace(LINES[name], label=label)
    ends = lines(ax, pd.concat(rows), "tokens", "ms", "name", looks)
    log_values(ax)
    doubling_axis(ax)
    ax.set_xlabel("tokens")
    what = "Causal attention, forward and backward, one head of 64, bf16"
    ax.set_title(f"{what}:\nGPU time in ms on one {style.device_name(data.PUBLISHED)}", loc="left")
    name_ends(figure, ends, looks)


if __name__ == "__main__":
    write()
