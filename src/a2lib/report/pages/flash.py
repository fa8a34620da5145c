"""FlashAttention: GPU times, rates, counters and least times of its rows; the chapter's figures."""

import numpy as np
import pandas as pd

from a2lib.report import data, panels, plots
from a2lib.report.metrics import OURS, by_graph
from a2lib.report.page import one, pick
from a2lib.report.style import COLOURS, DIM, Look, Looks, chart
from a2lib.report.units import count, digits, ms, percent
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
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
LENGTHS = tuple(2**n for n in range(7, 17))
HEAD_DIMS = (16, 32, 64, 128)
COUNTED = (OURS, "sdpa_cudnn", "sdpa_flash")
SHAPE = ["dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BOARD = {"batch": 1, "heads": 16, "n_queries": 16384, "n_keys": 16384, "head_dim": 64}
OWN = ("forward", "backward")
# The tiles (queries, keys) of the kernels for Hopper by head size, at the leaderboard shape.
TILES = {
    64: {"forward": (64, 128), "backward": (128, 128)},
    128: {"forward": (128, 128), "backward": (64, 128)},
}
SMALL, ROUND = 2**20, 2 * 2**20  # of PyTorch's allocator: the rest that it keeps, and its segments
HOPPER = ("nvidia-h200", "nvidia-h100-80gb-hbm3")  # whose kernels are those for Hopper
THEIRS = "triton_forward_compiled_backward"  # of the published writeup


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows with ``ms`` the GPU time (of a CUDA-graph replay; of the call where there is
    none) and more columns.

    called: the time launched from Python, ms
    kind: "one head", "board" (the leaderboard shape) or "paper" (FlashAttention-3's shapes)
    tflops: the rate by the papers' count, TFLOP/s
    peer, best: the fastest attention of PyTorch at the same shape, and its ms
    expected: bytes of the tensors that a tiled implementation allocates
    rounded: by how much more their blocks can be in PyTorch's allocator, bytes
    matrices: what the peak has beyond ``expected``, in N x N matrices
    """
    derived = by_graph(rows).assign(called=rows["ms"], name=rows["implementation"].map(LOOKS.label))
    derived["kind"] = "board"
    derived.loc[rows["heads"] * rows["head_dim"] == 2048, "kind"] = "paper"
    derived.loc[rows["heads"] == 1, "kind"] = "one head"
    sizes = rows[["batch", "heads", "seq_len", "seq_len", "head_dim"]].astype(int)
    sizes = sizes.to_numpy().tolist()
    flops = [
        attention.attention_flops(*s, bool(c), p)
        for s, c, p in zip(sizes, rows["causal"], rows["pass"], strict=True)
    ]
    derived["tflops"] = np.array(flops) / derived["ms"].astype(float) / 1e9
    new = rows["device"].isin(HOPPER)
    ours = rows["implementation"] == OURS
    split = ours & (rows["dtype"] == "fp32")
    widths = rows["dtype"].map(BYTES)
    cases = zip(sizes, widths, rows["pass"], rows["causal"], new, ours, split, strict=True)
    tensors = [_tensors(*case).values() for case in cases]
    derived["expected"] = [sum(sizes) for sizes in tensors]
    # A block is not cut where at most SMALL would be left of it. A multiple of ROUND gets a block
    # of its size.
    derived["rounded"] = [
        SMALL * sum(size > SMALL and size % ROUND > 0 for size in sizes) for sizes in tensors
    ]
    squares = [s[0] * s[1] * s[2] ** 2 * b for s, b in zip(sizes, widths, strict=True)]
    derived["matrices"] = (derived["peak_bytes"].astype("Float64") - derived["expected"]) / squares
    peers = derived[~derived["implementation"].isin((OURS, PART, FA4))].dropna(subset=["ms"])
    peers = peers.sort_values("ms").drop_duplicates(SHAPE)[[*SHAPE, "implementation", "ms"]]
    peers = peers.rename(columns={"implementation": "peer", "ms": "best"})
    return derived.merge(peers, "left", SHAPE)


def _tensors(sizes, width, pass_, causal, new, ours, terms) -> dict[str, int]:
    batch, heads, *n, d = sizes
    sweep = new and attention.in_one_sweep(n[1], batch * heads, d, width)
    chunks = ours and attention.cut_in_chunks(*n, batch * heads, d, bool(causal), width)
    keys = attention.keys_per_chunk(*n, batch * heads, bool(causal), width) if ours else 0
    parts = attention.n_chunks_of(keys, *n, bool(causal)) if keys else 0
    return attention.tiled_memory(*sizes, width, pass_, sweep, chunks, parts, terms)


def against(rows: pd.DataFrame, **where) -> pd.Series:
    """Return a2lib's time over that of the fastest peer, shape by shape."""
    a2lib = pick(rows, implementation=OURS, **where)
    return (a2lib["ms"] / a2lib["best"]).astype(float)


def fastest_peers(rows: pd.DataFrame, **where) -> set[str]:
    """Return the fastest peer of each shape."""
    return set(pick(rows, implementation=OURS, **where)["peer"])


def mean(ratios: pd.Series) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(ratios).mean()))


def over_fa4(rows: pd.DataFrame, **where) -> pd.Series:
    """Return a2lib's time over FlashAttention-4's where both were measured, by SHAPE."""
    a2lib, fa4 = (
        pick(rows, implementation=name, **where).set_index(SHAPE)["ms"].astype(float)
        for name in (OURS, FA4)
    )
    return (a2lib / fa4).dropna()


def calls(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return what hardware counters said, a row for each call.

    l2_bytes, device_bytes: bytes through L2 and device memory, of all kernels of the call
    tensor, exp: percent of the cycles in which tensor cores and exponential units are busy
    issue: percent of the instruction slots that are used
    The percents are of the kernel that moves most bytes; the others prepare and convert.
    """
    lines = []
    key = ["implementation", *SHAPE]
    for values, call in rows[rows["status"] == "ok"].sort_values("launch").groupby(key):
        # A later run does not replace launches that only the older version of a call had.
        call = call[call["run"] == call["run"].iloc[0]]
        main = call.loc[call["l2_bytes"].astype(float).idxmax()]
        lines.append(
            {
                **dict(zip(key, values, strict=True)),
                "run": main["run"],
                "l2_bytes": call["l2_bytes"].astype(float).sum(),
                "device_bytes": call["device_bytes"].astype(float).sum(),
                "tensor": float(main["tensor_percent"]),
                "exp": float(main["exp_percent"]),
                "issue": float(main["issue_percent"]),
            }
        )
    return pd.DataFrame(lines)


def sheet(quantity: str) -> float:
    """Return what the GPU's data sheet says (data/reference/devices.csv), in that file's unit."""
    return float(one(data.load_devices(), device=data.PUBLISHED, quantity=quantity).value)


def best_public() -> float:
    """Return the best verified time of the 2025 leaderboard, ms, on an H100."""
    rows = data.load_reference("flash")
    return float(rows.set_index("implementation").loc["leaderboard_2025_best", "ms"])


def rates() -> dict[str, float]:
    """Return the most that each unit of the GPU does in a ms: operations, exponentials, bytes; at
    the clock of the data sheet's peak."""
    peak = sheet("bf16_dense") * 1e9
    clocks = peak / sheet("tensor_bf16")  # of all SMs together, in a ms
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


def tile_times(tiles) -> np.ndarray:
    """Return the time of causal attention over so many tiles, a program each, in times of one tile:
    that of the longest program, or that of all tiles shared by the SMs, if longer."""
    tiles = np.asarray(tiles, dtype=float)
    return np.maximum(tiles, tiles**2 / (2 * sheet("multiprocessors")))


def first(rows: pd.DataFrame, **where) -> str:
    """Return the fastest implementation of a shape."""
    return pick(rows, **where).dropna(subset=["ms"]).sort_values("ms")["implementation"].iloc[0]


def growth(rows: pd.DataFrame, n: int, **where) -> float:
    """Return the time at length ``n`` over that at half of it, of one implementation and pass."""
    return one(rows, seq_len=n, **where).ms / one(rows, seq_len=n // 2, **where).ms


def _two(figure, parts: pd.DataFrame, **looks):
    """Draw stacked bars of two columns, which a legend names above; return the axes."""
    ax = figure.subplots()
    plots.stacked(ax, parts, dict(zip(parts, COLOURS[1::-1], strict=True)), **looks)
    panels.legend(figure, ax.get_legend_handles_labels()[0], columns=2)
    return ax


@chart(height=3.3)
def bars(figure, rows: pd.DataFrame):
    """Draw forward and backward at BOARD, a bar for each implementation, below the least time of
    the tensor cores; the three that would need a longer axis are named beside the bars."""
    time = rows.pivot(index="implementation", columns="pass", values="ms").astype(float)
    shown = [FA4, OURS, "sdpa_cudnn", "flex", "sdpa_flash"]
    parts = time.loc[shown, ["forward", "backward"]].rename(index=LOOKS.label)
    least = {p: [least_times(p)["tensor cores"]] for p in parts}
    parts = pd.concat([pd.DataFrame(least, index=["least time"]), parts])
    far = {LOOKS.label(n): time.loc[n, "end_to_end"] for n in time.index if n not in shown}
    text = [ms(v) for v in parts.sum(axis=1)]
    text[0] = " + ".join(digits(least[p][0]) for p in parts) + f" = {text[0]}"
    ax = _two(figure, parts, text=text, least=0.1, xlabel="GPU time, ms")
    words = "\n".join(f"{n}: {ms(v)}" for n, v in sorted(far.items(), key=lambda nv: nv[1]))
    corner = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
    ax.annotate(f"far to the right:\n{words}", (1, 0.98), color=DIM, **corner)


@chart(height=2.7)
def busy(figure, counted: pd.DataFrame):
    """Draw how long tensor cores and exponential units are busy in each call, a bar for each."""
    names = ["tensor cores busy", "exponential units busy"]
    parts = counted[["tensor", "exp"]].set_axis(names, axis=1)
    of = counted["implementation"].map(LOOKS.label) + ", " + counted["pass"].map(PASSES)
    parts.index = of
    ax = _two(figure, parts, least=9, xlabel="% of the cycles")
    ax.axvline(100, color=DIM, linestyle="--", linewidth=1)
    ax.set_xlim(0, 165)
    for y, (tensor, exp) in enumerate(parts.to_numpy()):
        words = f"{digits(tensor)} + {digits(exp)} = {percent((tensor + exp) / 100)}"
        ax.annotate(words, (max(tensor + exp, 100) + 3, y), va="center")


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
    ax.set_xscale("log", base=2)
    ax.set_xticks(LENGTHS[::2], [count(n) for n in LENGTHS[::2]])
    ax.minorticks_off()
    ax.annotate("dotted: max(P, P²/264)", (130, 2.2), color=DIM)
    ax.set(xlabel="tokens", ylabel="backward, ms")
    panels.name_ends(figure, ends, LOOKS)


@chart(height=3.9)
def sustained(figure, rows: pd.DataFrame):
    """Draw the time of both passes and the clock in ten seconds without a pause."""
    axes = figure.subplots(2, 1, sharex=True)
    for ax, (column, label) in zip(
        axes, (("ms", "both passes, ms"), ("sm_mhz", "SM clock, MHz")), strict=True
    ):
        ends = plots.lines(ax, rows, "second", column, "implementation", LOOKS)
        ax.set_ylabel(label)
    axes[0].set_ylim(bottom=0)
    axes[1].set_xlabel("second")
    panels.name_ends(figure, ends, LOOKS)
