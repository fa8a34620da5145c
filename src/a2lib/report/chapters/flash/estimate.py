"""What the leaderboard's shape must cost before it is measured: each limit, and which one binds."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.flash.rows import BYTES, Flash
from a2lib.report.metrics import OURS, time_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.attention import Traffic, attention_bytes, attention_flops, tiled_traffic

SHAPE = {"batch": 1, "heads": 16, "n_queries": 16384, "n_keys": 16384, "head_dim": 64}
# Our kernels by pass, and their tiles in bf16 by head size (tests hold them to tiles.py).
KERNELS = {"forward": ("forward",), "backward": ("backward_dq", "backward_dkdv")}
TILE = (64, 64)
TILES = {
    64: {"forward": TILE, "backward_dq": TILE, "backward_dkdv": TILE},
    128: {"forward": TILE, "backward_dq": (128, 64), "backward_dkdv": (32, 64)},
}
MS = 1e3


def traffic(pass_: str, **sizes) -> list[Traffic]:
    """The traffic of each of our kernels of a pass, causal bf16, at SHAPE or at other sizes."""
    sizes = {**SHAPE, **sizes}
    tiles = TILES[sizes["head_dim"]]
    return [tiled_traffic(kernel, **sizes, causal=True, element_bytes=BYTES["bf16"],
                          Bq=tiles[kernel][0], Bk=tiles[kernel][1])
            for kernel in KERNELS[pass_]]  # fmt: skip


def clock(flash: Flash) -> float:
    """The clock in Hz at which the maker states the peak rate: peak / (what one clock does)."""
    per_clock = flash.sheet("multiprocessors") * flash.sheet("tensor_bf16")
    return flash.sheet("bf16_dense") * 1e12 / per_clock


def rates(flash: Flash) -> dict[str, float]:
    """What the GPU does in a second at most, by limit: operations, exponentials, bytes."""
    clocks = flash.sheet("multiprocessors") * clock(flash)
    return {
        "tensor cores": flash.sheet("bf16_dense") * 1e12,
        "exponentials": flash.sheet("exponentials") * clocks,
        "shared memory": flash.sheet("shared_bytes") * clocks,
        "device memory": flash.sheet("memory_bandwidth") * 1e12,
    }


def amounts(pass_: str) -> dict[str, int]:
    """What our kernels execute and move in a pass at SHAPE, by limit, with L2 and registers."""
    kernels = traffic(pass_)
    device = attention_bytes(**SHAPE, element_bytes=BYTES["bf16"], pass_=pass_)
    return {
        "tensor cores": sum(k.flops for k in kernels),
        "exponentials": sum(k.exponentials for k in kernels),
        "shared memory": sum(k.shared_bytes for k in kernels),
        "device memory": device,
        "L2": sum(k.l2_bytes for k in kernels),
        "registers": sum(k.register_bytes for k in kernels),
    }


def times(flash: Flash, pass_: str) -> dict[str, float]:
    """Milliseconds that each limit alone would take in a pass at SHAPE."""
    amount = amounts(pass_)
    return {limit: amount[limit] / rate * MS for limit, rate in rates(flash).items()}


def table(flash: Flash, caption: str, name: str) -> Table:
    """The estimate: what passes each level, forward and backward, and the time it takes there."""
    forward, backward = amounts("forward"), amounts("backward")
    took = {pass_: times(flash, pass_) for pass_ in KERNELS}
    rate = rates(flash)
    units = {"tensor cores": ("GFLOP", 1e9, f"{rate['tensor cores'] / 1e12:.1f} TFLOP/s"),
             "exponentials": ("G", 1e9, f"{rate['exponentials'] / 1e12:.2f} T/s"),
             "shared memory": ("GB", 1e9, f"{rate['shared memory'] / 1e12:.1f} TB/s"),
             "device memory": ("MB", 1e6, f"{rate['device memory'] / 1e12:.1f} TB/s"),
             "L2": ("GB", 1e9, "not published"), "registers": ("GB", 1e9, "–")}  # fmt: skip
    lines = []
    for limit, (unit, scale, at) in units.items():
        cells = [f"{style.digits(part[limit] / scale)} {unit}" for part in (forward, backward)]
        spent = [f"{style.digits(took[p][limit])} ms" if limit in rate else "–" for p in KERNELS]
        lines.append([limit, *cells, at, *spent])
    measured = [time_of(flash.leaderboard, implementation=OURS, pass_=p) for p in KERNELS]
    lines.append(["launches", *(str(len(KERNELS[p])) for p in KERNELS), "–", "–", "–"])
    shown = [MISSING if ms is None else f"**{style.digits(ms)} ms**" for ms in measured]
    lines.append(["**measured**", "", "", "", *shown])
    columns = ["limit", "forward", "backward", "rate", "forward takes", "backward takes"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def binding(flash: Flash, said: str | None = None) -> Markdown:
    """Which limit binds, and where the measured forward lies between the largest and the sum.

    `said` is what counters say of a forward that takes longer than the sum (counters.verdict).
    """
    took = times(flash, "forward")
    most = max(took.values())
    near = [limit for limit, ms in took.items() if ms > 0.9 * most]
    apart = took["tensor cores"] + took["exponentials"]
    if len(near) > 1:
        text = (f"**The answer.** Forward, no single limit binds: {listed(near)} need about the "
                f"same {style.digits(most)} ms")  # fmt: skip
    else:
        text = f"**The answer.** Forward, {near[0]} bind, with {style.digits(most)} ms"
    text += (f", and device memory, with {style.digits(took['device memory'])} ms, is far from it. "
             f"Were products and exponentials to take turns, they would need "
             f"{style.digits(apart)} ms")  # fmt: skip
    ms = time_of(flash.leaderboard, implementation=OURS, pass_="forward")
    if ms is None:
        return Markdown(f"{text}. How long it takes is not measured yet.")
    if ms <= apart:
        verdict = "less than that: some of them overlap"
    else:
        verdict = "more than that"
        verdict += (f". {said}" if said else ": either they hardly overlap, or L2, whose rate is "
                    "not published, holds them up; which of the two was not tested")  # fmt: skip
    return Markdown(f"{text}; it takes {style.digits(ms)} ms, {verdict}. {_products(flash)}")


def per_tile(flash: Flash) -> Markdown:
    """The same for one tile of 64 by 64, in clocks of one multiprocessor."""
    (one,) = traffic("forward", heads=1, n_queries=TILE[0], n_keys=TILE[1])
    stream = 2 * TILE[1] * SHAPE["head_dim"] * BYTES["bf16"]
    clocks = {
        "the products": one.flops / flash.sheet("tensor_bf16"),
        "its exponentials": one.exponentials / flash.sheet("exponentials"),
        "shared memory, at least": one.shared_bytes / flash.sheet("shared_bytes"),
    }
    words = ", ".join(f"{name} {value:.0f}" for name, value in clocks.items())
    text = (f"Seen from one multiprocessor, a tile of {TILE[0]} × {TILE[1]} scores takes, in "
            f"clocks: {words}. It brings {style.size(float(stream))} of keys and values "
            "through L2.")  # fmt: skip
    spent = clocks_per_tile(flash)
    if spent is None:
        return Markdown(f"{text} How many it takes together is not measured yet.")
    clocks, mhz, known = spent
    whose = "" if known else " (the data sheet's clock; that of the run was not recorded)"
    return Markdown(f"{text} Measured, it takes {clocks:.0f} in all, at {mhz:.0f} MHz{whose}.")


def clocks_per_tile(flash: Flash) -> tuple[float, float, bool] | None:
    """Clocks of a multiprocessor per visited tile of the measured forward, MHz, and if measured."""
    row = metrics.timed_row(flash.leaderboard, implementation=OURS, pass_="forward")
    if row is None:
        return None
    known = not pd.isna(row.sm_mhz)
    mhz = row.sm_mhz if known else clock(flash) / 1e6
    tiles = sum(k.tiles for k in traffic("forward"))
    return row.ms / MS * mhz * 1e6 * flash.sheet("multiprocessors") / tiles, mhz, known



def _products(flash: Flash) -> str:
    took, peak = times(flash, "backward"), flash.sheet("bf16_dense") * 1e12
    least = attention_flops(**SHAPE, causal=True, pass_="backward") / peak * MS
    return (
        f"Backward, the tensor cores need {style.digits(took['tensor cores'])} ms for the seven "
        f"products that are executed, {style.digits(least)} ms for the five that count."
    )
