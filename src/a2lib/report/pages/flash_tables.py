"""Tables of attention's rows: by GPU time, by what the hardware counted, beside other people's."""

import numpy as np
import pandas as pd

from a2lib.report import data
from a2lib.report.metrics import OURS, ceilings, copy_bandwidth
from a2lib.report.page import LEVEL, one, pick
from a2lib.report.pages import flash
from a2lib.report.pages.flash import BOARD, LOOKS, OWN, PASSES, THEIRS
from a2lib.report.units import count, digits, ms, percent, quantity, span, tflops, times
from a2lib.theory.attention import attention_bytes, tiled_memory


def latency(rows: pd.DataFrame, index: list[str], value: str = "ms") -> pd.DataFrame:
    """Return times to three digits, a line for each value of the ``index`` columns (``seq_len`` is
    one), a column for each implementation; a GPU time within 2 % of its line's least is bold."""
    names = LOOKS.order(rows["implementation"])
    wide = rows.pivot(index=index, columns="implementation", values=value)[names].astype(float)
    status = rows.pivot(index=index, columns="implementation", values="status")[names]
    least = wide.min(axis=1)
    cells = wide.map(lambda v: digits(v, 3), na_action="ignore")
    cells = cells.fillna(status.replace("unsupported", "n/a"))
    if value == "ms":
        cells = cells.mask(wide.le(LEVEL * least, axis=0), "**" + cells + "**")
    cells = cells.rename(columns=LOOKS.label).reset_index()
    cells["seq_len"] = cells["seq_len"].map(count)
    return cells.rename(columns={"seq_len": "tokens", "head_dim": "d"})


def limits(measured: dict) -> pd.DataFrame:
    """Return the least time of each unit by itself at the leaderboard shape, and the rows
    ``measured`` of the passes."""
    per_ms = flash.rates()
    units = {"tensor cores": "TFLOP/s", "exponentials": "T/s"}
    lines = [
        [unit, quantity(rate / 1e9, units.get(unit, "TB/s"), 3)]
        + [ms(flash.least_times(p)[unit], 3) for p in OWN]
        for unit, rate in per_ms.items()
    ]
    lines.append(["**measured**", "", *(f"**{ms(measured[p].ms, 3)}**" for p in OWN)])
    return pd.DataFrame(lines, columns=["unit", "data-sheet rate", "forward", "backward"])


def at_board(rows: pd.DataFrame) -> pd.DataFrame:
    """Return GPU times at the leaderboard shape, the fastest first, with rate and MFU."""
    rows = pick(rows, kind="board")
    wide = rows.pivot(index="implementation", columns="pass", values="ms").astype(float)
    wide = wide.sort_values("end_to_end")[list(PASSES)]
    rate = pick(rows, pass_="end_to_end").set_index("implementation")["tflops"].loc[wide.index]
    cells = wide.map(lambda v: digits(v, 3)).rename(columns=PASSES)
    cells["TFLOP/s"] = [digits(r, 3) for r in rate]
    cells["MFU"] = [percent(r / flash.sheet("bf16_dense")) for r in rate]
    cells = cells.rename(index=LOOKS.label).rename_axis("GPU time, ms")
    return cells.reset_index()


def tiles() -> pd.DataFrame:
    """Return the tiles of the Hopper kernels at 16 causal heads of 16,384 tokens."""
    lines = []
    for pass_ in OWN:
        for head_dim, kernels in flash.TILES.items():
            queries, keys = kernels[pass_]
            if pass_ == "forward":
                consumers, owned, streamed = queries // 64, f"{queries} queries", f"{keys} keys"
            else:
                consumers, owned, streamed = 2, f"{keys} keys", f"{queries} queries"
            programs = 2 if consumers == 1 else 1
            lines.append([f"{pass_}, heads of {head_dim}", owned, streamed, consumers, programs])
    names = ["kernel", "a program owns", "blocks that pass", "consumers", "programs per SM"]
    return pd.DataFrame(lines, columns=names)


def machines(protocols: list[pd.DataFrame], plain: list[pd.DataFrame]) -> pd.DataFrame:
    """Return means by protocol, clock, power and plain rates of two machines at the leaderboard
    shape."""

    def both(column, **where):
        return [getattr(one(p, **where), column) for p in protocols]

    last = {"protocol": "sustained", "second": 9}
    cells = {}
    for name in (OURS, "sdpa_cudnn", "sdpa_flash"):
        short = LOOKS.label(name)
        cells[f"{short}, burst"] = both("ms_mean", protocol="burst", implementation=name)
        cells[f"{short}, tenth second"] = both("ms_mean", **last, implementation=name)
    for name in (OURS, "sdpa_cudnn", "sdpa_flash", "compile"):
        board = both("ms_mean", protocol="board", implementation=name)
        cells[f"{LOOKS.label(name)}, leaderboard protocol"] = board
    cells |= {
        "clock in a2lib's tenth second, MHz": both("sm_mhz", **last, implementation=OURS),
        "power, W": both("power_w", **last, implementation=OURS),
        "bf16 matmul, TFLOP/s": [ceilings(c)["bf16"] for c in plain],
        "device copy, TB/s": [copy_bandwidth(c) for c in plain],
    }
    return pd.DataFrame(
        [[words, *(digits(v, 3) for v in (a, b, b / a))] for words, (a, b) in cells.items()],
        columns=["forward and backward, mean in ms", "H200", "H100", "H100 / H200"],
    )


def spreads() -> pd.DataFrame:
    """Return times launched from Python at the leaderboard shape: median, p20 and p80, and how
    often it was timed."""
    rows = data.load("flash")
    rows = pick(rows, local=False, batch=1, heads=16, head_dim=64)
    cells = [
        f"{digits(r.ms, 3)} ({digits(r.ms_p20, 3)} to {digits(r.ms_p80, 3)}), {r.n}"
        for r in rows.itertuples()
    ]
    wide = rows.assign(cell=cells).pivot(index="implementation", columns="pass", values="cell")
    wide = wide.loc[LOOKS.order(wide.index), list(PASSES)]
    wide = wide.rename(index=LOOKS.label, columns=PASSES).rename_axis("ms (p20 to p80), samples")
    return wide.reset_index()


def memory_parts(measured: int) -> pd.DataFrame:
    """Return the tensors of a2lib's peak at BOARD, in bf16, and the measured peak."""
    what = {"o": "output", "lse": "log-sum-exp, fp32", "rows": "two numbers per query, fp32"}
    what["sums"] = "sums of dQ, fp32"
    held = tiled_memory(*BOARD.values(), 2, "end_to_end", one_sweep=True)
    lines = [[f"`{n}`", what.get(n, "gradient"), f"{size:,}"] for n, size in held.items()]
    lines += [["", "sum", f"{sum(held.values()):,}"], ["", "measured peak", f"{measured:,}"]]
    return pd.DataFrame(lines, columns=["tensor", "what it is", "bytes"])


def counters(counted: pd.DataFrame) -> pd.DataFrame:
    """Return hardware counters at 16 heads and 16,384 tokens, beside the bytes of each tensor
    once."""
    lines = []
    for r in (
        pick(counted, heads=16, seq_len=16384).sort_values(["head_dim", "pass"]).to_dict("records")
    ):
        d, pass_ = r["head_dim"], r["pass"]
        once = attention_bytes(**BOARD | {"head_dim": d}, element_bytes=2, pass_=pass_)
        lines.append(
            [f"{LOOKS.label(r['implementation'])}, {pass_}", d, digits(r["l2_bytes"] / 1e9, 3)]
            + [digits(r["device_bytes"] / 1e9, 3), digits(once / 1e9, 3)]
            + [percent(r["tensor"] / 100), percent(r["exp"] / 100)]
        )
    names = ["", "d", "L2, GB", "device, GB", "each tensor once"]
    return pd.DataFrame(lines, columns=[*names, "tensor cores", "exponentials"])


def plain_operations(ceiling: pd.DataFrame) -> pd.DataFrame:
    """Return measured matmuls and copies beside the data sheet, with the clock."""
    stated = {"bf16": "bf16_dense", "fp32": "fp32_plain"}
    lines = []
    for r in pick(ceiling.dropna(subset=["ms"]), operation="matmul").itertuples():
        rate = 2 * r.size**3 / r.ms / 1e9
        share = percent(rate / flash.sheet(stated[r.dtype]))
        name = f"{r.dtype} matmul of {r.size} × {r.size}"
        lines.append([name, tflops(rate, 3), quantity(r.sm_mhz, "MHz", 4), share])
    copy = copy_bandwidth(ceiling)
    share = percent(copy / flash.sheet("memory_bandwidth"))
    lines.append(["device copy, read plus written", quantity(copy, "TB/s", 3), None, share])
    return pd.DataFrame(lines, columns=["operation", "measured", "clock", "of the data sheet"])


def accuracy(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the largest relative error of any tensor and head size, by dtype and scale of
    scores."""
    wide = rows.groupby(["implementation", "dtype", "score_scale"])["error"].max().unstack([1, 2])
    wide = wide.loc[LOOKS.order(wide.index)].map(lambda e: "n/a" if e != e else f"{e:.1e}")
    wide.columns = [f"{d}{'' if s == 1 else f', scores × {s:.0f}'}" for d, s in wide.columns]
    return wide.rename(index=LOOKS.label).rename_axis("largest relative error").reset_index()


def one_head(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a2lib's time of both passes over the fastest peer's, by dtype, head size, length."""
    rows = pick(rows, kind="one head", implementation=OURS, pass_="end_to_end")
    rows = rows[~rows["seq_len"].isin([256, 1024])]
    rows = rows.assign(ratio=(rows["ms"] / rows["best"]).map("{:.2f}".format))
    wide = rows.pivot(index=["dtype", "head_dim"], columns="seq_len", values="ratio")
    wide = wide.rename(columns=count).reset_index()
    return wide.rename(columns={"dtype": "", "head_dim": "d"})


def beside_fa4(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a2lib's time over FlashAttention-4's with many heads, by length and mask, head size
    and pass; the longest is the leaderboard shape."""
    ratios = pd.concat([flash.over_fa4(rows, kind=kind) for kind in ("paper", "board")])
    ratios = pick(ratios.rename("ratio").reset_index(), pass_=OWN)
    ratios["cell"] = ratios["ratio"].map("{:.2f}".format)
    wide = ratios.pivot(
        index=["seq_len", "causal"], columns=["head_dim", "pass"], values="cell"
    ).sort_index(ascending=[True, False])
    lines = [
        [f"{count(n)}, {'causal' if causal else 'no mask'}"]
        + [wide.loc[(n, causal)].get((d, p)) for d in (64, 128) for p in OWN]
        for n, causal in wide.index
    ]
    heads = [f"heads of {d}: {pass_}" for d in (64, 128) for pass_ in OWN]
    return pd.DataFrame(lines, columns=["tokens", *heads])


def splits(rows: pd.DataFrame, lengths) -> pd.DataFrame:
    """Return what is split for one causal head, by pass and head size, up to how many tokens, and
    a2lib's time over the fastest peer's at some lengths in bf16."""
    cases = [
        ("forward", "", flash.HEAD_DIMS, "keys", "16,384"),
        ("backward", ", heads up to 32", (16, 32), "queries", "32,768"),
        ("backward", ", heads of 64", (64,), "queries", "16,384"),
        ("backward", ", heads of 128", (128,), "queries", "16,384"),
    ]
    lines = []
    for pass_, heads, head_dims, what, most in cases:
        where = {"kind": "one head", "dtype": "bf16", "pass_": pass_, "seq_len": lengths}
        ratios = flash.against(rows, **where, head_dim=head_dims)
        lines.append([f"{pass_}{heads}", what, most, span(ratios, times, 3)])
    return pd.DataFrame(lines, columns=["pass, bf16", "split by", "up to, tokens", "share"])


def published(rows: pd.DataFrame, lengths=(1024, 16384, 65536)) -> pd.DataFrame:
    """Return ms of one causal head of 64: what another writeup printed for an H800, and a2lib's GPU
    times; each with its gain over eager on the same GPU."""
    theirs = data.load_reference("flash", numbers=("speedup_over_eager",))
    wanted = {"head_dim": 64, "heads": 1}
    lines = []
    for dtype in ("bf16", "fp32"):
        for pass_, title in PASSES.items():
            for n in lengths:
                here = {**wanted, "dtype": dtype, "pass_": pass_, "seq_len": n}
                other = pick(theirs, device="H800", **here).set_index("implementation")
                own = pick(rows, **here).set_index("implementation")["ms"]
                printed = [
                    "oom" if np.isnan(v) else f"{v:.2f}" for v in other.loc[["eager", THEIRS], "ms"]
                ]
                gains = other.loc[THEIRS, "speedup_over_eager"], own["eager"] / own[OURS]
                gains = [None if np.isnan(g) else f"{digits(g, 3)}×" for g in gains]
                lines.append(
                    [f"{dtype} {title}", count(n), *printed, gains[0]]
                    + [digits(own["eager"], 3), digits(own[OURS], 3), gains[1]]
                )
    return pd.DataFrame(
        lines,
        columns=["pass", "tokens", "H800 eager", "theirs", "gain", "H200 eager", "a2lib", "gain "],
    )
