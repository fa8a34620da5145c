"""Eager attention in PyTorch: times and memory of its passes beside what theory counts of them."""

import pandas as pd

from a2lib.report import panels, plots
from a2lib.report.metrics import by_graph, ceilings, copy_bandwidth
from a2lib.report.page import one, pick
from a2lib.report.style import Chart, Look, Looks
from a2lib.report.tables import cells
from a2lib.report.units import count, digits
from a2lib.theory.eager import Eager, attention_kernels, longest
from a2lib.theory.roofline import floor

BATCH = 8
LENGTHS, SIZES = (256, 1024, 4096, 8192, 16384), (16, 32, 64, 128)
LONGEST = LENGTHS[-1]
PASSES = ("forward", "backward")
LOOKS = Looks(
    {
        "a2lib": Look("a2lib's Flash", "#d55e00", "o", ours=True),
        "eager": Look("eager", "#444444", "s"),
    }
)
# The attentions of ``flash`` by the names of the page's table.
PEERS = {
    "eager": "eager",
    "compile": "eager, `torch.compile`",
    "sdpa_efficient": "PyTorch, memory-efficient",
    "sdpa_flash": "PyTorch, FlashAttention-2",
    "flex": "PyTorch, FlexAttention",
    "sdpa_cudnn": "PyTorch, cuDNN",
    "a2lib": "a2lib's FlashAttention",
    "fa4": "FlashAttention-4",
}
NO_MATRIX = ("sdpa_efficient", "sdpa_flash", "flex", "sdpa_cudnn", "a2lib", "fa4")
MASKS = {False: "no mask", True: "causal"}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add columns to the rows of batch 8 in fp32.

    gpu: GPU time in ms, of a CUDA-graph replay, or of the call where a row has no replay
    whole: bytes of all tensors at the peak
    held, added: of eager attention, bytes before a pass and at its peak, by counting
    matrix: bytes of one matrix
    matmuls, least: the least time of the matmuls and of the whole pass, ms
    """
    rows = rows[(rows["batch"] == BATCH) & (rows["dtype"] == "fp32")].reset_index(drop=True)
    rate, bandwidth = ceilings(rows_of("ceiling")).get("fp32"), copy_bandwidth(rows_of("ceiling"))
    theory = []
    for row in rows.rename(columns={"pass": "pass_"}).itertuples():
        is_eager = row.implementation == "eager"
        theory.append(_theory(row, rate, bandwidth) if is_eager else {})
    return rows.assign(
        gpu=_gpu_ms(rows),
        whole=rows["held_bytes"] + rows["peak_bytes"],
    ).join(pd.DataFrame(theory, index=rows.index))


def _gpu_ms(rows: pd.DataFrame) -> pd.Series:
    return by_graph(rows)["ms"].astype(float)


def shape(n: int = LONGEST, d: int = 64, causal: bool = False) -> Eager:
    return Eager(BATCH, int(n), int(d), bool(causal))


def _theory(row, rate: float | None, bandwidth: float | None) -> dict[str, float]:
    eager = shape(row.seq_len, row.head_dim, row.causal)
    counted = {
        "matrix": eager.matrix,
        "held": eager.held(row.pass_),
        "added": eager.peak(row.pass_),
    }
    if rate and bandwidth:
        kernels = attention_kernels("eager", eager.causal, row.pass_, BATCH, eager.n, eager.d, 4)
        least = floor(kernels, rate * 1e12, bandwidth * 1e12)
        counted["matmuls"] = least["products"].ms
        counted["least"] = least["total"].ms
    return counted


def at(rows, pass_="forward", n=LONGEST, d=64, causal=False, implementation="eager"):
    """Return the row of a pass."""
    return one(
        rows, implementation=implementation, seq_len=n, head_dim=d, causal=causal, pass_=pass_
    )


def both_ms(rows, implementation: str, n: int = LONGEST) -> float:
    """Return the GPU's ms for a causal forward and backward with heads of 64."""
    total = 0.0
    for pass_ in PASSES:
        total += at(rows, pass_, n, causal=True, implementation=implementation).gpu
    return total


def least_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the least times of the causal example's kernels beside the GPU's time."""
    lines = {"ms": ["matmuls", "moving matrices", "least time", "**measured**"]}
    for pass_ in PASSES:
        row = at(rows, pass_, causal=True)
        least = cells([row.matmuls, row.least - row.matmuls, row.least])
        lines[pass_] = [*least, f"**{digits(row.gpu, 3)}**"]
    return pd.DataFrame(lines)


def least_shares(rows: pd.DataFrame) -> pd.Series:
    """Return the least time as a share of the GPU's, of eager attention at 16,384 tokens by mask,
    pass and head size."""
    here = pick(rows, implementation="eager", seq_len=LONGEST)
    here = here.set_index(["causal", "pass", "head_dim"]).sort_index()
    return here["least"] / here["gpu"]


def errors_over_eager(
    accuracy: pd.DataFrame, score_scale: int, measure: str = "error"
) -> pd.DataFrame:
    """Return the errors of a2lib's output and gradients over eager's, fp32 and causal: a column for
    each tensor, a line for each head size and number of heads."""
    here = pick(accuracy, dtype="fp32", causal=True, score_scale=score_scale)
    lines = ["head_dim", "heads"]
    wide = here.pivot_table(measure, lines, ["implementation", "tensor"])
    return wide["a2lib"] / wide["eager"]


def limits(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add ``counted_len``: the longest sequence by the closed form of what is allocated, blocks or,
    where segments expand, tensors alone."""
    lengths = []
    for row in rows.rename(columns={"pass": "pass_"}).itertuples():
        length = longest(
            int(row.batch),
            int(row.head_dim),
            bool(row.causal),
            int(row.room_bytes),
            row.pass_,
            step=int(row.fails_len - row.fits_len),
            in_blocks=row.allocator == "blocks",
        )
        lengths.append(length)
    return rows.assign(counted_len=lengths)


def saved(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return eager's rows with ``counted``, the bytes of the tensor that theory says are saved."""
    rows = rows[(rows["implementation"] == "eager") & (rows["status"] == "ok")]
    counted = []
    for row in rows.itertuples():
        sizes = shape(row.seq_len, row.head_dim, row.causal).saved()
        counted.append(sizes.get(row.tensor, 0))
    return rows.assign(counted=counted)


def memory(rows: pd.DataFrame, room: float, fails_len: int) -> Chart:
    """Draw the peak in GB over the tokens, of eager attention and of a2lib's, a line at the
    ``room`` bytes that were free, and a cross at what eager's tensors would have taken at the
    length at which it ran out."""
    rows = pick(rows, implementation=list(LOOKS))
    rows = rows.assign(gb=rows["whole"].astype(float) / 1e9)

    def draw(figure):
        ax = figure.subplots()
        ends = plots.lines(ax, rows, "seq_len", "gb", "implementation", LOOKS)
        plots.log_values(ax)
        panels.doubling_axis(ax)
        plots.reference(ax, room / 1e9, "free on the GPU")
        failed = shape(fails_len, causal=True).total("backward")
        ax.plot(fails_len, failed / 1e9, marker="x", color=LOOKS["eager"].colour, markersize=8)
        ax.set(xlabel="tokens", ylabel="GB at the backward's peak")
        panels.name_ends(figure, ends, LOOKS)

    return Chart(draw, height=3.2)


def unmasked_matmul_ms(rate: float) -> float:
    """Return ms of the seven matmuls of a forward and backward at ``rate``, in TFLOP/s, without the
    masked half."""
    return 7 * 2 * BATCH * LONGEST**2 * 64 / 2 / rate / 1e9


def with_heads(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows of ``flash`` for causal heads of 64, with ``gpu`` as above."""
    here = pick(rows, batch=1, head_dim=64, seq_len=LONGEST, causal=True, pass_="end_to_end")
    return here.assign(gpu=_gpu_ms(here))


def peer(rows: pd.DataFrame, name: str):
    """Return the row of an attention in PEERS with 16 heads in bf16."""
    return one(rows, implementation=name, dtype="bf16", heads=16)


def fp32_peer(rows: pd.DataFrame, name: str):
    """Return the row of an attention in PEERS with one head in fp32."""
    return one(rows, implementation=name, dtype="fp32", heads=1)


def peers(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the GPU time and memory of each attention in PEERS."""
    lines = []
    for name, title in PEERS.items():
        row = peer(rows, name)
        writes = "no" if name in NO_MATRIX else "yes"
        lines.append([title, writes, digits(row.gpu, 3), digits(row.peak_bytes / 1e9)])
    head = ["attention", "writes the matrix", "GPU time, ms", "memory, GB"]
    return pd.DataFrame(lines, columns=head)


def every_time(rows: pd.DataFrame) -> pd.DataFrame:
    """Return times and memory of eager attention without a mask at every length and head size."""
    key = ["seq_len", "head_dim"]
    eager = pick(rows, implementation="eager", causal=False)
    forward = pick(eager, pass_="forward").set_index(key).sort_index()
    backward = pick(eager, pass_="backward").set_index(key).reindex(forward.index)
    columns = {
        "tokens": forward.index.get_level_values("seq_len").map(count),
        "d": forward.index.get_level_values("head_dim"),
        "forward, ms": _means(forward),
        "backward, ms": _means(backward),
        "before backward, GB": cells(backward["held_bytes"] / 1e9),
    }
    return pd.DataFrame(columns)


def _means(rows: pd.DataFrame) -> list[str]:
    """Return the mean and the standard deviation of each row's time, or why there is none."""
    words = []
    for row in rows.itertuples():
        if row.status != "ok":
            words.append(row.status)
        elif pd.isna(row.ms_std):
            words.append(digits(row.ms_mean, 3))
        else:
            words.append(f"{digits(row.ms_mean, 3)} ± {digits(row.ms_std, 2)}")
    return words
