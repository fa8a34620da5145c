"""Tables of eager attention: its causes, its excess, its longest sequences, what others printed."""

import pandas as pd

from a2lib.report.data import load_reference
from a2lib.report.page import pick
from a2lib.report.pages.attention import (
    ACCOUNTS,
    LENGTHS,
    LONGEST,
    PASSES,
    SIZES,
    accesses,
    both_ms,
    published,
    shape,
)
from a2lib.report.tables import MISSING
from a2lib.report.units import count, digits, ms, percent, span
from a2lib.theory.eager import longest

ALLOCATORS = {"blocks": "usual", "expandable": "expandable"}
ACCOUNT_LINES = (
    "matrices before the backward",
    "tensors of the size of Q",
    "the mask",
    "rows of N numbers per sequence",
    "matrices that the backward adds",
    "tensors that it adds",
    "workspaces of cuBLAS",
    "figures given to the last digit",
)
ROOMS = (16e9, 24e9, 40e9, 80e9)  # bytes


def masked(causal: bool) -> str:
    return "causal" if causal else "no mask"


def matmul_ms(rate: float, masked_half: bool) -> float:
    """Return ms of the seven matmuls of a forward and backward at ``rate``, in TFLOP/s."""
    whole = 7 * 2 * 8 * LONGEST**2 * 64 / rate / 1e9
    return whole if masked_half else whole / 2


def causes(rows: pd.DataFrame, rate: float) -> pd.DataFrame:
    """Return what a2lib's FlashAttention gains over eager attention, cause by cause."""
    eager = both_ms(rows, "eager")
    times = {
        "eager (measured)": eager,
        "no matrix in memory: matmuls alone (calculated)": matmul_ms(rate, masked_half=True),
        "and without the masked half (calculated)": matmul_ms(rate, masked_half=False),
        "and on tensor cores: a2lib (measured)": both_ms(rows, "a2lib"),
    }
    lines = [[words, ms(time), percent(time / eager)] for words, time in times.items()]
    return pd.DataFrame(lines, columns=["forward and backward", "time", "share of eager"])


def excess(rows: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """Return eager's time above the least time, in accesses, a line for each pass and mask."""
    wide = accesses(rows, bandwidth).unstack("head_dim")
    lines = [
        [f"{pass_}, {masked(causal)}", *(digits(wide.loc[(pass_, causal), d]) for d in SIZES)]
        for pass_ in PASSES
        for causal in (False, True)
    ]
    return pd.DataFrame(lines, columns=["", *(f"d = {d}" for d in SIZES)])


def longest_sequences(limits: pd.DataFrame) -> pd.DataFrame:
    """Return the longest sequence that ran, by allocator and pass, and what tensors alone allow."""
    lines = []
    for allocator, name in ALLOCATORS.items():
        for pass_ in PASSES:
            for causal in (False, True):
                here = pick(limits, allocator=allocator, pass_=pass_, causal=causal)
                ran = here.set_index("head_dim")["fits_len"]
                cells = [count(ran[d]) for d in SIZES]
                tensors = span(here["tensors_len"], count)
                lines.append([name, f"{pass_}, {masked(causal)}", *cells, tensors])
    heads = [f"d = {d}" for d in SIZES]
    return pd.DataFrame(lines, columns=["allocator", "pass", *heads, "tensors alone"])


def mean(row) -> str:
    """Return mean and standard deviation of a row's time, or why there is none."""
    if row is None:
        return MISSING
    if row.status != "ok":
        return row.status
    if pd.isna(row.ms_std):
        return digits(row.ms_mean, 3)
    return f"{digits(row.ms_mean, 3)} ± {digits(row.ms_std, 2)}"


def cell(value, scale: float = 1.0) -> str:
    return MISSING if pd.isna(value) else digits(value / scale, 3)


def passes(rows: pd.DataFrame, n: int, d: int, causal: bool, implementation: str = "eager"):
    """Return the rows of a forward and of its backward, or None for one that is not there."""
    is_here = (
        (rows["implementation"] == implementation)
        & (rows["seq_len"] == n)
        & (rows["head_dim"] == d)
        & (rows["causal"] == causal)
    )
    here = {r.pass_: r for r in rows[is_here].rename(columns={"pass": "pass_"}).itertuples()}
    return here.get("forward"), here.get("backward")


def every_time(rows: pd.DataFrame, causal: bool) -> pd.DataFrame:
    """Return times and memory of eager attention at every length and head size."""
    cells = pick(rows, implementation="eager", causal=causal)[["seq_len", "head_dim"]]
    lines = []
    for n, d in sorted(set(cells.itertuples(index=False, name=None))):
        forward, backward = passes(rows, n, d, causal)
        lines.append(
            [
                count(n),
                d,
                mean(forward),
                cell(forward.gpu),
                mean(backward),
                cell(backward.gpu),
                cell(backward.held_bytes, 1e9),
                cell(backward.peak_bytes, 1e9),
            ]
        )
    names = ["tokens", "d", "forward, ms", "GPU, ms", "backward, ms", "GPU, ms "]
    return pd.DataFrame(lines, columns=[*names, "before, GB", "added, GB"])


def tensors() -> pd.DataFrame:
    """Return every tensor before a pass and what is added at its peak, MiB, by counting; their sums
    in bytes."""
    passes = {
        f"{pass_}, {masked(causal)}": (shape(causal=causal), pass_)
        for pass_ in PASSES
        for causal in (False, True)
    }
    before = {name: eager.inputs(pass_) for name, (eager, pass_) in passes.items()}
    added = {name: eager.added(pass_) for name, (eager, pass_) in passes.items()}
    lines = _lines("before", before) + _lines("added", added)
    return pd.DataFrame(lines, columns=["tensor", *passes])


def _lines(when: str, tensors: dict[str, dict[str, int]]) -> list[list[str]]:
    """Return a line for each tensor, and one for their sum."""
    names = list(dict.fromkeys(name for sizes in tensors.values() for name in sizes))
    lines = []
    for name in names:
        sizes = [column.get(name) for column in tensors.values()]
        cells = [MISSING if size is None else f"{size / 2**20:,.4g}" for size in sizes]
        lines.append([f"{when}: {name}", *cells])
    sums = [f"{sum(column.values()):,}" for column in tensors.values()]
    return [*lines, [f"**{when}, bytes**", *sums]]


def by_memory(room: float) -> pd.DataFrame:
    """Return the longest sequence by the memory that is free, by counting: heads of 64."""
    lines = []
    for size in (*ROOMS, room):
        line = [f"{size / 1e9:.0f}"]
        for pass_, causal in (("forward", False), ("forward", True), ("backward", False)):
            for in_blocks in (False, True):
                line.append(count(longest(8, 64, causal, int(size), pass_, in_blocks=in_blocks)))
        lines.append(line)
    names = ["GB", "forward: tensors", "blocks", "causal: tensors", "blocks "]
    names += ["with backward: tensors", "blocks  "]
    return pd.DataFrame(lines, columns=names)


def without_matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """Return eager attention and a2lib's, causal, heads of 64: mean times and memory by length."""
    lines = []
    for n in sorted(pick(rows, implementation="a2lib")["seq_len"].unique()):
        line = [count(n)]
        for implementation in ("eager", "a2lib"):
            forward, backward = passes(rows, n, 64, True, implementation)
            line += [_mean(forward), _mean(backward), cell(backward.whole, 1e9)]
        line.append(digits(shape(n, 64, True).total("backward") / 1e9, 3))
        lines.append(line)
    names = ["tokens", "eager: forward, ms", "backward, ms", "GB"]
    names += ["a2lib: forward, ms", "backward, ms ", "GB ", "eager by counting, GB"]
    return pd.DataFrame(lines, columns=names)


def _mean(row) -> str:
    return digits(row.ms_mean, 3) if row.status == "ok" else row.status


def least_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the least time, the GPU time and the launch cost of every row of eager attention."""
    rows = rows.sort_values(
        ["causal", "seq_len", "head_dim", "pass"], ascending=[True, True, True, False]
    )
    lines = []
    for r in rows.rename(columns={"pass": "pass_"}).itertuples():
        times = r.matmuls, r.least, r.gpu, r.ms_host
        names = f"{r.pass_}, {masked(r.causal)}", count(r.seq_len), r.head_dim
        lines.append([*names, *(cell(time) for time in times), percent(r.least / r.gpu)])
    names = ["pass", "tokens", "d", "least time of matmuls", "least time"]
    return pd.DataFrame(lines, columns=[*names, "GPU time", "launch cost", "least / GPU"])


def accounts() -> pd.DataFrame:
    """Return what published programs held and added, by the account of each."""
    figures = published().groupby("device")["same"].agg(["sum", "size"])
    columns = {"tensors": list(ACCOUNT_LINES)}
    for device, account in ACCOUNTS.items():
        added = account.added or (MISSING, MISSING)
        columns[device] = [
            account.matrices,
            account.tensors,
            "yes" if account.mask else "no",
            account.rows,
            *added,
            f"2 × {account.workspace:g} MiB",
            f"{figures.loc[device, 'sum']} of {figures.loc[device, 'size']}",
        ]
    return pd.DataFrame(columns)


def beside_published(rows: pd.DataFrame) -> pd.DataFrame:
    """Return forward and backward as others printed them, and as measured here without a mask."""
    printed = load_reference("attention").set_index(["device", "seq_len", "head_dim", "pass"])
    lines = []
    for n in LENGTHS:
        for d in SIZES:
            line = [count(n), d]
            for pass_, row in zip(PASSES, passes(rows, n, d, False), strict=True):
                line += [_printed(printed, (device, n, d, pass_)) for device in ACCOUNTS]
                line.append(_mean(row))
            lines.append(line)
    names = ["tokens", "d", "80 GB", "H800", "small", "H200"]
    return pd.DataFrame(lines, columns=[*names, "80 GB ", "H800 ", "small ", "H200 "])


def _printed(printed: pd.DataFrame, key: tuple) -> str:
    if key not in printed.index:
        return MISSING
    row = printed.loc[[key]].iloc[0]
    return f"{row['ms']:g}" if row["status"] == "ok" else row["status"]
