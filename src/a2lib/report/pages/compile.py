"""torch.compile: what it gains for attention and whole models, beside what counting predicts."""

import pandas as pd

from a2lib.report.data import load_reference
from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.page import one, pick
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.panels import doubling_axis, name_ends
from a2lib.report.plots import label, lines, name_lanes
from a2lib.report.style import COLOURS, chart, palette
from a2lib.report.traces import kernels
from a2lib.report.units import count, digits, percent
from a2lib.shapes import SIZES
from a2lib.theory.eager import attention_kernels, moves
from a2lib.theory.roofline import Kernel, floor
from a2lib.theory.step_floor import compiled_step, eager_step

LENGTHS = (256, 1024, 4096, 8192, 16384)
MODELS = ("small", "medium", "large", "xl25", "2.7B")
HEAD_SIZES = (16, 32, 64, 128)
BATCH, TOKENS = 4, 512  # of the models' training steps
LOOKS = palette(HEAD_SIZES)
STEP = {"mode": "train-step", "context": TOKENS, "phase": "wall"}
# The steps whose kernels were traced and whose compiled form keeps the GPU busy.
TRACED = tuple((model, "fp32") for model in MODELS) + (("2.7B", "bf16"),)


def attention(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row of attention:

    gain: eager's GPU time divided by this row's, of the same case
    floor: the least time of its kernels, ms
    expected: eager's floor divided by this row's
    matrices: how many N x N matrices it reads and writes
    """
    rates, bandwidth = ceilings(rows_of("ceiling")), copy_bandwidth(rows_of("ceiling"))
    key = ["written", "dtype", "batch", "head_dim", "seq_len", "pass"]
    rows = rows.copy()
    rows["floor"] = [
        _least_ms(*cells, rates, bandwidth)
        for cells in rows[["implementation", *key]].itertuples(index=False, name=None)
    ]
    eager = rows[rows["implementation"] == "eager"].set_index(key)[["ms_graph", "floor"]]
    base = rows[key].join(eager, on=key)
    rows["gain"] = base["ms_graph"] / rows["ms_graph"]
    rows["expected"] = base["floor"] / rows["floor"]
    case = rows[["implementation", "written", "pass"]].itertuples(index=False, name=None)
    rows["matrices"] = [_matrices(*cells) for cells in case]
    return rows


def _least_ms(implementation, written, dtype, batch, d, n, pass_, rates, bandwidth) -> float:
    width = {"fp32": 4, "bf16": 2}[dtype]
    sizes = int(batch), int(n), int(d), width
    launched = attention_kernels(implementation, written, pass_, *sizes)
    return floor(launched, rates[dtype] * 1e12, bandwidth * 1e12)["total"].ms


def _matrices(implementation: str, written: str, pass_: str) -> int | None:
    may_be_replaced = (implementation, written) == ("compile", "heads")
    return None if may_be_replaced else moves(implementation, written, pass_)


def models(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row of a model:

    gain: eager's time divided by this row's, both launched from Python
    pays: the number of steps after which the time spent on compiling is won back
    """
    key = ["model", "context", "batch", "mode", "precision", "attention", "phase"]
    rows = rows.copy()
    eager = rows[rows["compile"] == "none"].set_index(key)[["ms", "ms_cold"]]
    base = rows[key].join(eager, on=key)
    rows["gain"] = base["ms"] / rows["ms"]
    extra = rows["ms_cold"] - base["ms_cold"]
    saved = base["ms"] - rows["ms"]
    rows["pays"] = (extra / saved).where((extra > 0) & (saved > 0))
    return rows


def shares(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Return, for each traced training step at 512 tokens, the kernel time of matmuls and of the
    rest in ms, and the matmuls' ``share``; by model, precision, attention and compile."""
    traced = kernels(rows)
    if traced.empty:
        return rows.iloc[:0]
    few = traced[(traced["mode"] == "train-step") & (traced["context"] == TOKENS)]
    few = few[few["profiler"] == "nsys"]
    few = few.assign(what=few["kind"].eq("matmul").map({True: "matmul", False: "rest"}))
    wide = few.pivot_table(
        "ms", ["model", "precision", "attention", "compile"], "what", aggfunc="sum"
    )
    wide = wide.reindex(columns=["matmul", "rest"])
    return wide.assign(share=wide["matmul"] / wide.sum(axis=1)).reset_index()


def step(rows: pd.DataFrame, model: str, precision: str = "fp32", compiled: str = "blocks"):
    """Return the row of a whole training step, launched from Python."""
    return one(rows, model=model, precision=precision, compile=compiled, **STEP)


def eager_in_graph(benchmark: pd.DataFrame, model: str, precision: str) -> float:
    """Return the time of an eager training step replayed from a CUDA graph, ms."""
    case = {"attention": "eager", "compile": "none", "capture": True, **STEP}
    return one(benchmark, model=model, precision=precision, **case).ms


def matmul_share(traced: pd.DataFrame, model: str, precision: str) -> float:
    """Return the matmuls' share of the kernel time of an eager training step."""
    case = {"compile": "none", "attention": "eager"}
    return one(traced, model=model, precision=precision, **case).share


def _bytes_between_matmuls(kernels_: list[Kernel]) -> int:
    return sum(each.count * (each.read + each.written) for each in kernels_ if not each.flops)


def bytes_left(model: str, precision: str) -> float:
    """Return which part of the bytes that an eager step moves outside of matmuls remains if all
    between two matmuls is one kernel, by counting."""
    case = SIZES[model], BATCH, TOKENS, precision
    fused, eager = compiled_step(*case), eager_step(*case)
    return _bytes_between_matmuls(fused) / _bytes_between_matmuls(eager)


def amdahl(share: float, left: float) -> float:
    """Return the gain of a step whose matmuls take ``share`` of the time, if everything else takes
    ``left`` times its time."""
    return 1 / (share + (1 - share) * left)


def predictions(rows: pd.DataFrame, benchmark: pd.DataFrame, traced: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each step of TRACED:

    share: of matmuls in eager's kernel time
    left: the part of all other bytes that remains, by counting
    predicted: the gain by both
    gain: eager in a CUDA graph divided by compiled blocks, launched from Python
    """
    table = []
    for model, precision in TRACED:
        share, left = matmul_share(traced, model, precision), bytes_left(model, precision)
        gain = eager_in_graph(benchmark, model, precision) / step(rows, model, precision).ms
        table.append((model, precision, share, left, amdahl(share, left), gain))
    names = ["model", "precision", "share", "left", "predicted", "gain"]
    return pd.DataFrame(table, columns=names)


@chart(height=3.0)
def predicted_and_measured(figure, table: pd.DataFrame):
    """Draw the predicted and the measured gain of each step of ``predictions``."""
    ax = figure.subplots()
    places = range(len(table))
    ax.plot(table["predicted"], places, "|", color=COLOURS[4], markersize=15, markeredgewidth=2)
    ax.plot(table["gain"], places, "o", color=COLOURS[0], markersize=7)
    last = table.iloc[-1]
    below = {"va": "center"}
    label(ax, "measured", (last["gain"], len(table) - 1), (-62, 0), color=COLOURS[0], **below)
    label(ax, "predicted", (last["predicted"], len(table) - 1), (7, 0), **below)
    names = [
        f"{TITLES[model]}, {precision}: {percent(share)}"
        for model, precision, share in zip(
            table["model"], table["precision"], table["share"], strict=True
        )
    ]
    name_lanes(ax, places, names)
    ax.invert_yaxis()
    ax.set(xlim=(1, 1.78), xlabel="times as fast as eager in a CUDA graph")


@chart(height=2.9)
def by_length(figure, rows: pd.DataFrame):
    """Draw the gain of compiled attention on the GPU against the length, a line per head size."""
    few = rows[(rows["implementation"] == "compile") & (rows["seq_len"] >= 1024)]
    axes = figure.subplots(1, 2, sharey=True)
    for ax, pass_ in zip(axes, ("forward", "backward"), strict=True):
        ends = lines(ax, few[few["pass"] == pass_], "seq_len", "gain", "head_dim", LOOKS)
        doubling_axis(ax)
        ax.axhline(1, color="#000000", linewidth=0.8)
        ax.set(title=pass_, xlabel="tokens", ylim=(0.9, None))
    axes[0].set_ylabel("times as fast as eager")
    name_ends(figure, ends, LOOKS)


def fused_attention() -> Drawing:
    """Draw the kernels of an attention forward, eager and compiled, and the N x N matrices that
    pass through memory between them."""
    matmul, other, height, gap = "fill: #86b6e6", "fill: #f0ad78", 30, 24
    eager = [("QKᵀ", 68, matmul), ("scale", 76, other), ("softmax", 76, other), ("PV", 68, matmul)]
    compiled = [("QKᵀ", 68, matmul), ("scale and softmax", 176, other), ("PV", 68, matmul)]
    elements = []
    for y, name, chain in ((28, "eager", eager), (108, "compiled", compiled)):
        passes = 2 * (len(chain) - 1)
        elements.append(text(0, y - 12, name, bold=True))
        elements.append(text(WIDTH, y - 12, f"{passes} passes over the matrix", anchor="end"))
        x = 0
        for words, width, style in chain:
            if x:
                arrow = f"M{x - gap + 2} {y + height / 2:g}h{gap - 4}l-6 -4m6 4l-6 4"
                elements.append(stroke(arrow, width=1.6))
            elements.append(box(x, y, width, height, style, words))
            x += width + gap
    words = "an arrow: the N × N matrix is written, then read"
    elements.append(text(WIDTH / 2, 162, words, anchor="middle"))
    return Drawing(elements, 172)


def recognized(rows: pd.DataFrame, pass_: str, implementation: str = "compile"):
    """Return the row of the one attention that Inductor replaces: bf16, with a head dimension."""
    case = {"written": "heads", "dtype": "bf16", "seq_len": 16384, "pass_": pass_}
    return one(rows, implementation=implementation, **case)


def at_length(rows: pd.DataFrame, tokens: int, head_dim: int, pass_: str, implementation="compile"):
    """Return a row of attention in fp32 without a mask."""
    case = {"written": "plain", "dtype": "fp32", "implementation": implementation}
    return one(rows, seq_len=tokens, head_dim=head_dim, pass_=pass_, **case)


def replaces_only_bf16_with_heads(rows: pd.DataFrame) -> bool:
    """Return whether Inductor called PyTorch's attention in the bf16 rows with a head dimension,
    and launched kernels of its own in all other compiled rows."""
    compiled = pick(rows, implementation="compile")
    expected = (compiled["written"] == "heads") & (compiled["dtype"] == "bf16")
    plain = {"written": "plain", "dtype": "fp32"}
    most = pick(rows, implementation="compile", **plain)["launches"].astype(float).max()
    least = pick(rows, implementation="eager", **plain)["launches"].astype(float).min()
    return bool((compiled["attentions"] == expected).all() and expected.sum() == 2) and (
        most < least + 3
    )


def gains_most_at(rows: pd.DataFrame, tokens: int) -> bool:
    """Return whether compiled fp32 attention without a mask is faster than eager everywhere, and
    its forward gains most at ``tokens`` for every head size."""
    compiled = pick(rows, written="plain", dtype="fp32", implementation="compile")
    forward = compiled[compiled["pass"] == "forward"]
    grid = forward.pivot(index="head_dim", columns="seq_len", values="gain").astype(float)
    return bool(compiled["gain"].min() > 1 and (grid.idxmax(axis=1) == tokens).all())


def published() -> pd.DataFrame:
    """Return the times that others printed, eager and compiled, and the gain; a line per case."""
    rows = load_reference("compile")
    is_attention = rows["part"] == "attention"
    name = rows["model"].map(TITLES).mask(is_attention, "attention")
    phase = rows["phase"].mask(rows["phase"] == "wall", rows["mode"])
    tokens = rows["seq_len"].fillna(rows["context"])
    rows = rows.assign(what=name + ", " + phase, tokens=tokens)
    case = ["device", "what", "tokens", "head_dim"]
    wide = rows.pivot(index=case, columns="implementation", values="ms").astype(float)
    wide = wide.assign(gain=wide["eager"] / wide["compile"])
    cells = wide.map(lambda value: digits(value, 3), na_action="ignore").reset_index()
    for size in ("tokens", "head_dim"):
        cells[size] = cells[size].map(count, na_action="ignore")
    cells = cells[[*case, "eager", "compile", "gain"]]
    return cells.rename(columns={"what": "", "head_dim": "d", "compile": "compiled"})
