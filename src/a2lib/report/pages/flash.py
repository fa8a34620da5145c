"""FlashAttention: GPU times, rates, counters and least times of its rows; the chapter's figures."""

import numpy as np
import pandas as pd

from a2lib.report import data, panels, plots
from a2lib.report.metrics import OURS, by_graph, stated
from a2lib.report.page import LEVEL, one, pick
from a2lib.report.style import COLOURS, DIM, Chart, Look, Looks, chart
from a2lib.report.units import count, digits, ms
from a2lib.theory import attention

PART = "compiled_backward"  # its forward is a2lib's, which makes it no peer
FA4 = "fa4"  # a package of its own: "peers" are what PyTorch ships
LOOKS = Looks(
    {
        OURS: Look("a2lib", "#d55e00", "o", ours=True),
        "eager": Look("eager", "#444444", "s"),
        "compile": Look("compile", "#a86f00", "D"),
        "sdpa_flash": Look("FA2", "#0072b2", "^"),
        "sdpa_cudnn": Look("cuDNN", "#00825f", "v"),
        "sdpa_efficient": Look("efficient", "#2a86bf", "P"),
        "flex": Look("Flex", "#b0558a", "X"),
        FA4: Look("FA4", "#6a3d9a", "*"),
        PART: Look("a2lib + compile", "#8b5a2b", "p"),
    }
)
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "both passes"}
OWN = ("forward", "backward")
LENGTHS = tuple(2**n for n in range(7, 17))
HEAD_DIMS = (16, 32, 64, 128)
SHAPE = ["dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"]
LAUNCHER_SINCE = "20261129"  # a run's name begins with its time
BOARD = {"batch": 1, "heads": 16, "n_queries": 16384, "n_keys": 16384, "head_dim": 64}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows with ``ms`` the GPU time (of a CUDA-graph replay; of the call where there is
    none) and more columns.

    timed: a call launched from Python, between CUDA events behind a flush of the L2 cache, ms
    timed_p20: what a fifth of these calls take at most, ms
    steady: the longer of the GPU's time and the CPU's to launch the call, ms; no loop was timed
    kind: "one head", "board" (the leaderboard shape) or "paper" (FlashAttention-3's shapes)
    tflops: the rate by the papers' count, TFLOP/s
    peer, best: the fastest attention of PyTorch at the same shape, and its ms
    """
    derived = by_graph(rows)
    derived["timed"] = rows["ms"]
    derived["timed_p20"] = rows["ms_p20"]
    derived["steady"] = derived[["ms", "ms_host"]].astype(float).max(axis=1, skipna=False)
    derived["kind"] = "board"
    derived.loc[rows["heads"] * rows["head_dim"] == 2048, "kind"] = "paper"
    derived.loc[rows["heads"] == 1, "kind"] = "one head"
    flops = []
    for row in rows.rename(columns={"pass": "pass_"}).itertuples():
        n = int(row.seq_len)
        sizes = int(row.batch), int(row.heads), n, n, int(row.head_dim)
        flops.append(attention.attention_flops(*sizes, bool(row.causal), row.pass_))
    derived["tflops"] = np.array(flops) / derived["ms"].astype(float) / 1e9
    peers = derived[~derived["implementation"].isin((OURS, PART, FA4))].dropna(subset=["ms"])
    peers = peers.sort_values("ms").drop_duplicates(SHAPE)[[*SHAPE, "implementation", "ms"]]
    peers = peers.rename(columns={"implementation": "peer", "ms": "best"})
    return derived.merge(peers, "left", SHAPE)


def grouped(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows of grouped-query attention with ``ms`` the GPU time and ``timed`` that of a
    call launched from Python."""
    return by_graph(rows).assign(timed=rows["ms"])


def against(rows: pd.DataFrame, **where) -> pd.Series:
    """Return a2lib's time over that of the fastest peer, by SHAPE."""
    a2lib = pick(rows, implementation=OURS, **where).set_index(SHAPE)
    return (a2lib["ms"] / a2lib["best"]).astype(float)


def by_todays_launcher(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs in which a2lib launched its kernels as it does today: all in bf16,
    some in fp32, whose others tell the GPU's time alone."""
    return rows[rows["run"] >= LAUNCHER_SINCE]


FROM_PYTHON = ("steady", "timed")  # the two measures of a call launched from Python


def launched(rows: pd.DataFrame, dtype: str, time: str = "steady") -> pd.DataFrame:
    """Return a2lib's time over that of the fastest peer, both launched from Python: lengths by head
    sizes (``launched_beside``)."""
    return launched_beside(rows, dtype, time).max(axis=1).unstack()


def launched_by_both(rows: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """Return ``launched`` by each measure of FROM_PYTHON: lengths and head sizes by measures."""
    ratios = {time: launched(rows, dtype, time).stack().dropna() for time in FROM_PYTHON}
    return pd.DataFrame(ratios)


def lost_by_both(ratios: pd.DataFrame) -> pd.Series:
    """Return where a2lib is over 2 % slower by each measure of FROM_PYTHON."""
    return ratios.min(axis=1) > LEVEL


def lost_beyond_scatter(rows: pd.DataFrame, dtype: str) -> pd.Series:
    """Return where ``lost_by_both`` holds of both passes of one head and over four fifths of
    a2lib's timed calls take longer than the fastest peer's median."""
    ratios = launched_by_both(rows, dtype)
    one_head = {"kind": "one head", "dtype": dtype, "pass_": "end_to_end"}
    own = pick(by_todays_launcher(rows), implementation=OURS, **one_head)
    own = own.set_index(["seq_len", "head_dim"])[["timed", "timed_p20"]].astype(float)
    peer = own["timed"] / ratios["timed"]
    return lost_by_both(ratios) & (own["timed_p20"] > peer)


def won_by_both(ratios: pd.DataFrame) -> pd.Series:
    """Return where a2lib is over 2 % faster by each measure of FROM_PYTHON."""
    return ratios.max(axis=1) < 1 / LEVEL


def launched_beside(rows: pd.DataFrame, dtype: str, time: str = "steady") -> pd.DataFrame:
    """Return a2lib's time over each peer's, launched from Python (a measure of FROM_PYTHON) by
    today's launcher, both passes of one head: lengths and head sizes by peers. The fastest peer's
    is the largest of a line."""
    return _beside(by_todays_launcher(rows), dtype, time)


def launched_before(rows: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """Return ``launched_by_both`` of the rows by an older launcher of a2lib's."""
    older = rows[rows["run"] < LAUNCHER_SINCE]
    ratios = {time: _beside(older, dtype, time).max(axis=1) for time in FROM_PYTHON}
    return pd.DataFrame(ratios).dropna()


def _beside(rows: pd.DataFrame, dtype: str, time: str) -> pd.DataFrame:
    here = pick(rows, kind="one head", dtype=dtype, pass_="end_to_end")
    times = here.pivot(index=["seq_len", "head_dim"], columns="implementation", values=time)
    peers = times.astype(float).drop(columns=[OURS, PART, FA4], errors="ignore")
    return peers.rdiv(times[OURS].astype(float), axis=0)


def fastest_peers(rows: pd.DataFrame, **where) -> set[str]:
    """Return the fastest peer of each shape."""
    return set(pick(rows, implementation=OURS, **where)["peer"])


def mean(ratios: pd.Series) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(ratios).mean()))


def in_protocol(rows: pd.DataFrame, name: str, implementation: str = OURS, second: int = 0):
    """Return the row of both passes at the leaderboard shape by a protocol: "burst", "sustained",
    "fixed_order" (deterministic gradients) or "board" (the public leaderboard's)."""
    return one(rows, protocol=name, implementation=implementation, second=second)


def over(rows: pd.DataFrame, other: str, name: str, second: int = 0) -> float:
    """Return a2lib's time over another's by a protocol (``in_protocol``), launched from Python."""
    own = in_protocol(rows, name, OURS, second)
    return own.ms / in_protocol(rows, name, other, second).ms


def cost_of_order(rows: pd.DataFrame, implementation: str = OURS) -> float:
    """Return the time with deterministic gradients over that without."""
    ordered = in_protocol(rows, "fixed_order", implementation)
    return ordered.ms / in_protocol(rows, "burst", implementation).ms


def calls(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return what hardware counters said of each call's main kernel, which moves most bytes.

    tensor, exp: percent of the cycles in which tensor cores and exponential units are busy
    """
    key = ["implementation", *SHAPE]
    done = rows[rows["status"] == "ok"].sort_values("launch")
    # A later run does not replace launches that only the older version of a call had.
    done = done[done["run"] == done.groupby(key)["run"].transform("first")]
    done = done.assign(l2_bytes=done["l2_bytes"].astype(float)).sort_values("l2_bytes")
    main = done.drop_duplicates(key, keep="last")
    return main.assign(
        tensor=main["tensor_percent"].astype(float),
        exp=main["exp_percent"].astype(float),
    )


def sheet(quantity: str) -> float:
    """Return a quantity of the published GPU's data sheet (``metrics.stated``)."""
    return stated(data.PUBLISHED, quantity)


def best_public() -> float:
    """Return the best verified time of the 2025 leaderboard, ms, on an H100."""
    rows = data.load_reference("flash")
    return float(rows.set_index("implementation").loc["leaderboard_2025_best", "ms"])


def peak_mhz() -> float:
    """Return the clock of the data sheet's peak, at which all tensor cores together reach it."""
    return sheet("bf16_dense") / (sheet("multiprocessors") * sheet("tensor_bf16")) * 1e6


def rates() -> dict[str, float]:
    """Return the most that each unit of the GPU does in a ms: operations, exponentials, bytes; at
    the clock of the data sheet's peak."""
    peak = sheet("bf16_dense") * 1e9
    clocks = peak_mhz() * 1e3 * sheet("multiprocessors")  # of all SMs together, in a ms
    return {
        "tensor cores": peak,
        "exponentials": sheet("exponentials") * clocks,
        "device memory": sheet("memory_bandwidth") * 1e9,
    }


def least_times(pass_: str) -> dict[str, float]:
    """Return the least ms of each unit by itself at BOARD: for the matmuls that a pass needs, an
    exponential for each score below the diagonal, and each tensor once."""
    amounts = {
        "tensor cores": attention.attention_flops(**BOARD, causal=True, pass_=pass_),
        "exponentials": BOARD["heads"] * BOARD["n_queries"] ** 2 / 2,
        "device memory": attention.attention_bytes(**BOARD, element_bytes=2, pass_=pass_),
    }
    return {unit: amounts[unit] / rate for unit, rate in rates().items()}


def latency(rows: pd.DataFrame, index: list[str], time: str = "ms") -> pd.DataFrame:
    """Return times to three digits, of the GPU or of another column ``time``: a line for each value
    of the ``index`` columns (``seq_len`` is one), a column for each implementation; what is within
    2 % of its line's least is bold."""
    names = LOOKS.order(rows["implementation"])
    wide = rows.pivot(index=index, columns="implementation", values=time)[names].astype(float)
    status = rows.pivot(index=index, columns="implementation", values="status")[names]
    first = wide.le(LEVEL * wide.min(axis=1), axis=0)
    shown = wide.map(lambda v: digits(v, 3), na_action="ignore")
    shown = shown.fillna(status.replace("unsupported", "n/a"))
    shown = shown.mask(first, "**" + shown + "**")
    shown = shown.rename(columns=LOOKS.label).reset_index()
    shown["seq_len"] = shown["seq_len"].map(count)
    return shown.rename(columns={"seq_len": "tokens", "head_dim": "d"})


def tile_times(tiles) -> np.ndarray:
    """Return the time of causal attention over so many tiles, a program each, in times of one tile:
    that of the longest program, or that of all tiles shared by the SMs, if longer."""
    tiles = np.asarray(tiles, dtype=float)
    return np.maximum(tiles, tiles**2 / (2 * sheet("multiprocessors")))


def growth(rows: pd.DataFrame, n: int, **where) -> float:
    """Return the time at length ``n`` over that at half of it, of one implementation and pass."""
    return one(rows, seq_len=n, **where).ms / one(rows, seq_len=n // 2, **where).ms


def bars(rows: pd.DataFrame) -> Chart:
    """Draw forward and backward at BOARD, a bar for each of the five fastest implementations, below
    the least time of the tensor cores."""
    time = rows.pivot(index="implementation", columns="pass", values="ms").astype(float)
    time = time.sort_values("end_to_end").rename(index=LOOKS.label)
    parts = time.iloc[:5][["forward", "backward"]]
    least = {pass_: least_times(pass_)["tensor cores"] for pass_ in parts}
    parts = pd.concat([pd.DataFrame(least, index=["least time"]), parts])
    text = []
    for bar in parts.itertuples():
        total = ms(bar.forward + bar.backward, 3)
        text.append(f"{digits(bar.forward, 3)} + {digits(bar.backward, 3)} = {total}")
    colours = {"forward": "#808080", "backward": COLOURS[4]}  # others are implementations'
    looks = {"numbers": False, "room": 0.6, "xlabel": "GPU time, ms"}
    return plots.stacks(parts, colours, 3.3, text=text, **looks)


@chart(height=3.2)
def regimes(figure, rows: pd.DataFrame):
    """Draw time against length, a line for each implementation, and tile_times, its one factor
    fitted to the longer half of FlashAttention-2, which has a program for each tile of 128."""
    rows = rows.sort_values("seq_len")
    tile, fitted = 128, pick(rows, implementation="sdpa_flash").query("seq_len >= 2048")
    at, took = fitted["seq_len"].to_numpy(float), fitted["ms"].to_numpy(float)
    fine = np.geomspace(LENGTHS[0], LENGTHS[-1], 200)
    factor = np.exp(np.log(took / tile_times(at / tile)).mean())
    ax = figure.subplots()
    ax.plot(fine, factor * tile_times(fine / tile), color=DIM, linestyle=":", linewidth=1.6)
    ends = plots.lines(ax, rows, "seq_len", "ms", "implementation", LOOKS)
    plots.reference(ax, 2 * sheet("multiprocessors") * tile, "GPU full", vertical=True)
    plots.log_values(ax)
    panels.doubling_axis(ax)
    words = f"dotted: max(P, P²/{2 * sheet('multiprocessors'):.0f})"
    ax.annotate(words, (130, 2.2), color=DIM)
    ax.set(xlabel="tokens", ylabel="backward, ms")
    panels.name_ends(figure, ends, LOOKS)
