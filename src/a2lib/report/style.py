"""How an implementation looks and is called, in every figure and table of the book."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """Label, colour and marker of one implementation; ours is drawn thicker and on top."""

    label: str
    colour: str
    marker: str
    ours: bool = False


# Okabe and Ito's palette without its yellow, which is too light for a line on white; the marker
# repeats what the colour says.
LOOKS = {
    "a2lib": Look("a2lib (ours)", "#D55E00", "o", ours=True),
    "eager": Look("PyTorch eager", "#444444", "s"),
    "compile": Look("torch.compile", "#E69F00", "D"),
    "sdpa_flash": Look("SDPA FlashAttention-2", "#0072B2", "^"),
    "sdpa_cudnn": Look("SDPA cuDNN", "#009E73", "v"),
    "sdpa_efficient": Look("SDPA memory-efficient", "#56B4E9", "P"),
    "flex": Look("FlexAttention", "#CC79A7", "X"),
    "tiled": Look("tiled PyTorch", "#8B5A2B", "p"),
}
SHORT = {
    "a2lib": "ours", "eager": "eager", "compile": "compile", "sdpa_flash": "SDPA FA2",
    "sdpa_cudnn": "cuDNN", "sdpa_efficient": "SDPA eff.", "flex": "Flex", "tiled": "tiled",
}  # fmt: skip
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
DTYPES = ("bf16", "fp32", "fp16")
DEVICES = {"nvidia-h200": "NVIDIA H200", "cpu": "CPU"}
STATUS = {"oom": "oom", "unsupported": "n/a", "error": "error"}

RC = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5, "legend.fontsize": 8.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "figure.facecolor": "white",
    "savefig.facecolor": "white", "svg.fonttype": "path", "svg.hashsalt": "a2lib",
    "font.family": "DejaVu Sans",
}  # fmt: skip


def look(implementation: str) -> Look:
    """The look of an implementation; an unknown one is drawn in grey under its own name."""
    return LOOKS.get(implementation, Look(implementation, "#888888", "."))


def implementations(present) -> list[str]:
    """The implementations among `present`, in the book's order, unknown ones last."""
    present = set(present)
    return [name for name in LOOKS if name in present] + sorted(present - set(LOOKS))


def device_name(slug: str) -> str:
    """A device slug as people write it: nvidia-h200 -> NVIDIA H200."""
    if slug in DEVICES:
        return DEVICES[slug]
    words = slug.split("-")
    return " ".join(w.upper() if any(c.isdigit() for c in w) or w == "nvidia" else w.capitalize()
                    for w in words)  # fmt: skip


def digits(value: float | None, figures: int = 3) -> str:
    """A number to so many significant figures, without an exponent: 0.0123, 1.23, 12.3, 1234."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def tokens(value: float) -> str:
    """A sequence length with a thousands separator: 16,384."""
    return f"{int(value):,}"


def size(n_bytes: float | None) -> str:
    """Bytes in binary units: 1.50 GiB."""
    if n_bytes is None or not math.isfinite(n_bytes):
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{digits(n_bytes)} {unit}"
        n_bytes /= 1024
    return f"{digits(n_bytes)} GiB"


class Chart:
    """A matplotlib figure that a page shows as one reproducible SVG on a white card.

    `draw(figure)` fills the figure; the same data give the same bytes (no dates, fixed ids).
    """

    def __init__(self, draw, *, width: float = 5.4, height: float = 4.0):
        with rc_context(RC):
            self.figure = Figure(figsize=(width, height), layout="constrained")
            draw(self.figure)

    def save(self, file, **options) -> None:
        """Write the figure; the format follows from the file's name unless given."""
        with rc_context(RC):
            self.figure.savefig(file, **options)

    def _repr_svg_(self) -> str:
        buffer = io.StringIO()
        self.save(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return "Chart"
