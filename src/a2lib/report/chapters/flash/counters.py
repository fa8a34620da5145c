"""What the hardware counted while the kernels ran at the leaderboard's shape, beside the theory."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.flash import estimate, view
from a2lib.report.chapters.flash.rows import BYTES, Flash
from a2lib.report.metrics import OURS, pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.attention import KERNELS, attention_bytes

HEAD_DIMS = (64, 128)
PASSES = ("forward", "backward")
# A kernel with less than this share of the L2 traffic of its call's greatest only prepares or
# converts; the shares of pipelines shown are those of the others.
HELPER = 0.05


@dataclass(frozen=True)
class Counted:
    """One call: bytes of all its kernels; shares of busy time of its main ones, in percent.

    `tensor`, `exp` and `products` have an entry for each main kernel, in launch order; `products`
    is how many matrix products ours executes for a tile there, and 1 for another implementation.
    """

    device_bytes: int
    l2_bytes: int
    tensor: tuple[float, ...]
    exp: tuple[float, ...]
    products: tuple[int, ...]

    @property
    def busy(self) -> float:
        """Per cent of the call's time in which its tensor cores are busy, kernels by their work."""
        time = sum(p / share for p, share in zip(self.products, self.tensor, strict=True))
        return sum(self.products) / time


def of(
    flash: Flash,
    implementation: str,
    pass_: str,
    head_dim: int = 64,
    counted: pd.DataFrame | None = None,
) -> Counted | None:
    """What was counted of a call at the leaderboard's shape, or None; `counted` of another machine.

    Rows that belong together are those of the run of launch 0: a call of an older version may have
    had more launches, whose rows a later run does not replace.
    """
    counted = flash.counters if counted is None else counted
    rows = _at_shape(counted, implementation, pass_, head_dim).sort_values("launch")
    first = rows[(rows["launch"] == 0) & (rows["status"] == "ok")]
    if not len(first):
        return None
    rows = rows[rows["run"] == first["run"].iloc[0]]
    main = rows[rows["l2_bytes"] >= HELPER * rows["l2_bytes"].max()]
    names = main["kernel"].str.removesuffix("_kernel")
    return Counted(
        int(rows["device_bytes"].sum()),
        int(rows["l2_bytes"].sum()),
        tuple(map(float, main["tensor_percent"])),
        tuple(map(float, main["exp_percent"])),
        tuple(KERNELS[name][1] if name in KERNELS else 1 for name in names),
    )


def expected(pass_: str, head_dim: int = 64) -> int:
    """Bytes that our kernels of a pass ask of L2 by counting tiles, at the leaderboard's shape."""
    return sum(kernel.l2_bytes for kernel in estimate.traffic(pass_, head_dim=head_dim))


def once(pass_: str, head_dim: int = 64) -> int:
    """Bytes of each tensor of a pass once, at the leaderboard's shape."""
    sizes = {**estimate.SHAPE, "head_dim": head_dim}
    return attention_bytes(**sizes, element_bytes=BYTES["bf16"], pass_=pass_)


def rate(flash: Flash, implementation: str, pass_: str, head_dim: int = 64) -> float | None:
    """TB/s through L2: bytes counted over the time of the same shape, the GPU's where known."""
    counted, took = of(flash, implementation, pass_, head_dim), _ms(
        flash, implementation, pass_, head_dim)  # fmt: skip
    return counted.l2_bytes / took[0] / 1e9 if counted and took else None


def table(flash: Flash, caption: str, name: str) -> Table:
    """Bytes by level, the rate through L2, and how busy the pipelines are, by call."""
    lines = []
    for head_dim in HEAD_DIMS:
        for pass_ in PASSES:
            for implementation in view.LOOKS.order(flash.counters["implementation"].unique()):
                counted = of(flash, implementation, pass_, head_dim)
                if counted is None:
                    continue
                speed = rate(flash, implementation, pass_, head_dim)
                took = _ms(flash, implementation, pass_, head_dim)
                tiles = expected(pass_, head_dim) / 1e9 if implementation == OURS else None
                lines.append([
                    f"{view.LOOKS.short(implementation)}, {view.PASSES[pass_]}",
                    str(head_dim), style.digits(counted.l2_bytes / 1e9), style.digits(tiles),
                    "–" if speed is None else f"{speed:.1f}{'' if took[1] else '*'}",
                    style.digits(counted.device_bytes / 1e9),
                    style.digits(once(pass_, head_dim) / 1e9),
                    _shares(counted.tensor), _shares(counted.exp),
                ])  # fmt: skip
    columns = ["", "d", "L2 (GB)", "by tiles", "L2 (TB/s)", "device (GB)", "once (GB)",
               "tensor cores (%)", "exponentials (%)"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def note(flash: Flash) -> Markdown:
    """What the star of the table means, where a time is not the GPU's own."""
    took = [_ms(flash, i, p, d) for i in flash.counters["implementation"].unique()
            for p in PASSES for d in HEAD_DIMS if of(flash, i, p, d)]  # fmt: skip
    if not took:
        return Markdown("No hardware counters are measured yet.")
    text = ("A backward of two kernels has two shares. Percentages are of the time in which a "
            "multiprocessor has work.")  # fmt: skip
    ours, flash2 = (_tensor_ms(flash, name) for name in (OURS, "sdpa_flash"))
    if ours and flash2 and flash2 > 1.1 * ours:
        text += (" Busy is not fast: with heads of 64 the forward of SDPA FlashAttention-2 keeps "
                 f"its tensor cores busy {flash2 / ours:.1f} times as long as ours does for the "
                 "same products; our reading is that it issues the A100's instructions.")
    if any(t and not t[1] for t in took):
        text += " A star: over the time as called; the GPU's own is not measured at that shape."
    return Markdown(text)


def traffic(flash: Flash) -> Markdown:
    """Whether the count of L2 traffic holds, what cuDNN saves, what device memory carries."""
    ours = {(p, d): c for p in PASSES for d in HEAD_DIMS if (c := of(flash, OURS, p, d))}
    if not ours:
        return Markdown("What passes L2 and device memory is not counted yet.")
    match = [c.l2_bytes / expected(*key) for key, c in ours.items()]
    text = (f"Our kernels ask L2 for {min(match):.2f} to {max(match):.2f} times the bytes that "
            "counting tiles gives")  # fmt: skip
    text += ": the count holds." if max(match) < 1.05 and min(match) > 0.95 else ", which is off."
    for pass_, reason in (("forward", "tiles of twice as many queries halve it"),
                          ("backward", "a single sweep reads each tile once")):  # fmt: skip
        shares = [c.l2_bytes / ours[pass_, d].l2_bytes for d in HEAD_DIMS
                  if (pass_, d) in ours and (c := of(flash, "sdpa_cudnn", pass_, d))]  # fmt: skip
        if shares and max(shares) < 1:
            text += f" cuDNN's {pass_} asks for {_range(shares)} of ours ({reason})."
    extra = [c.device_bytes / once(*key) for key, c in ours.items()]
    speeds = [c.device_bytes / took[0] / 1e9 for key, c in ours.items()
              if (took := _ms(flash, OURS, *key))]  # fmt: skip
    text += (f" Device memory carries {_range(extra, 1)} times what each tensor once would take. "
             "Our reading: the programs with most keys start first, of every head, so that the "
             f"keys and values of all heads, {listed([_held(d) for d in HEAD_DIMS])}, are wanted "
             f"at once, and the L2 cache has {style.size(flash.sheet('l2_bytes'))}.")  # fmt: skip
    if speeds:
        text += (f" It costs little: at most {max(speeds):.2f} of "
                 f"{flash.sheet('memory_bandwidth'):g} TB/s.")  # fmt: skip
    return Markdown(text)


def on_the_second(flash: Flash) -> Markdown:
    """What the second machine counts otherwise, of the calls that were counted on both."""
    rows = flash.second["flash_counters"]
    both = {(i, p, d): pair for i in rows["implementation"].unique() for p in PASSES
            for d in HEAD_DIMS if all(pair := (of(flash, i, p, d), of(flash, i, p, d, rows)))}
    if not both:
        return Markdown("")
    l2 = max(abs(there.l2_bytes / here.l2_bytes - 1) for here, there in both.values())
    busy = max(abs(there.busy - here.busy) for here, there in both.values())
    text = (f"On the H100, for the {len(both)} calls counted there too, the bytes through L2 are "
            f"the same within {100 * l2:.1f} %, and the shares of busy tensor cores within "
            f"{busy:.1f} points")  # fmt: skip
    device = [there.device_bytes / here.device_bytes for (i, *_), (here, there) in both.items()
              if i == OURS]  # fmt: skip
    if device:
        text += f"; device memory carries {_range(device)} times as much for ours"
    return Markdown(f"{text}.")


def verdict(flash: Flash) -> str | None:
    """What the counters say of our forward with heads of 64: overlap, and whether L2 binds."""
    counted, speed = of(flash, OURS, "forward"), rate(flash, OURS, "forward")
    if counted is None or speed is None:
        return None
    both = counted.tensor[0] + counted.exp[0]
    text = (f"The counters ({{numref}}`tab-flash-counters`): tensor cores are busy for "
            f"{counted.tensor[0]:.0f} % of the time and exponential units for "
            f"{counted.exp[0]:.0f} %, {both:.0f} % together, ")  # fmt: skip
    text += ("about what taking turns gives" if both <= 100 else
             "so some of the one runs beside the other")  # fmt: skip
    wide = rate(flash, OURS, "forward", 128)
    if wide is not None and wide > speed:
        return (f"{text}. L2 is not at its limit: it serves {speed:.1f} TB/s here, and "
                f"{wide:.1f} to the same kernel with heads of 128")  # fmt: skip
    return f"{text}. Whether L2, at {speed:.1f} TB/s, is at its limit is open"


def _at_shape(rows: pd.DataFrame, implementation: str, pass_: str, head_dim: int) -> pd.DataFrame:
    shape = estimate.SHAPE
    return pick(rows, implementation=implementation, pass_=pass_, head_dim=head_dim, dtype="bf16",
                batch=shape["batch"], heads=shape["heads"], seq_len=shape["n_queries"],
                causal=True)  # fmt: skip


def _ms(flash: Flash, implementation: str, pass_: str, head_dim: int) -> tuple[float, bool] | None:
    """The time of the same shape, and whether it is the GPU's own."""
    row = row_of(_at_shape(flash.rows, implementation, pass_, head_dim).dropna(subset=["ms"]))
    if row is None:
        return None
    return (row.ms, False) if pd.isna(row.ms_graph) else (row.ms_graph, True)


def _tensor_ms(flash: Flash, implementation: str) -> float | None:
    """For how long the tensor cores of a forward with heads of 64 are busy."""
    counted, took = of(flash, implementation, "forward"), _ms(flash, implementation, "forward", 64)
    return took[0] * counted.busy / 100 if counted and took else None


def _held(head_dim: int) -> str:
    shape = estimate.SHAPE
    return style.size(float(2 * shape["heads"] * shape["n_keys"] * head_dim * BYTES["bf16"]))


def _shares(shares: tuple[float, ...]) -> str:
    return " / ".join(f"{share:.0f}" for share in shares)


def _range(values: list[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
