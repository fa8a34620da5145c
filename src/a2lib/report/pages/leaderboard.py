"""The 8B step: what each configuration's time and bytes should consist of, beside its rows."""

import dataclasses
from string import ascii_uppercase

import pandas as pd

from a2lib.activations import CHUNK
from a2lib.lab.kernel_names import kind_of
from a2lib.report.metrics import by_graph, ceilings, copy_bandwidth, stated_peak
from a2lib.report.plots import stacks
from a2lib.report.style import Chart
from a2lib.report.tables import cells
from a2lib.report.traces import pictures
from a2lib.report.units import count, percent
from a2lib.shapes import SIZES, Shape
from a2lib.theory.attention import attention_flops
from a2lib.theory.memory.keeping import block_always, block_results, fp8_bytes, working_bytes
from a2lib.theory.roofline import floor
from a2lib.theory.step_floor import fused_step
from a2lib.theory.transformer import forward_flops_by_part, parameter_count, step_flops

# A way of the rows, and its name on the page. Each step of the ladder keeps the changes before it.
LADDER = {
    "recomputed": "1 baseline",
    "attention_kept": "2 save attention",
    "fused_head": "3 fused loss",
    "own_fsdp": "4 a2lib's FSDP",
    "products_kept": "5 save matmuls",
    "offloaded": "6 offload",
    "own_attention": "7 a2lib's attention",
    "own_copies": "8 copy engines",
}
# Compared with the ladder, and no step of it.
BESIDE = {"fp8_ffn": "FP8 FFN", "bf16_states": "bf16 states"}
CONFIGURATIONS = {**LADDER, **BESIDE}
STATE_BYTES = {"bf16_states": 6}  # of a parameter: weight and moments; fp32 where not named
NO_PREDICTION = ("recomputed", "own_fsdp", "own_copies")  # of what a configuration gains
SAME_PEAK = ("fused_head", "own_fsdp", "own_attention")  # as the configuration before
PIECES = {
    "matmuls": "#0072b2",
    "FlashAttention": "#d55e00",
    "recomputed": "#b0558a",
    "elementwise": "#00825f",
    "AdamW": "#444444",
    "unaccounted": "#808080",
}
# Columns of the pieces that a trace shows.
TRACED = ["in matmuls", "in FlashAttention", "in elementwise", "in AdamW"]
# The piece that a kernel of a trace belongs to, by its class; the last two overlap with the others.
CLASSES = {
    "matmul": "matmuls",
    "attention": "FlashAttention",
    "communication": "collectives",
    "copy": "copies",
}

# cuBLAS's names on Hopper have a letter for each operand: q is FP8, t is bf16.
FP8_MATMUL = r"nvjet_sm90_qq"


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows in the order of the configurations, with these columns added. "Per GPU" holds
    for all of them.

    flops: operations of the model, causal attention counted half, nothing recomputed
    mfu, mfu_full, hfu: operations per second as a share of the data sheet's peak of bf16: so
        counted; with all of attention's scores; with what is recomputed; of FP8 none, whose peak
        is twice that
    state: bytes of weights and moments
    blocks: bytes that the forward leaves of the blocks
    again_bytes: bytes of matmul outputs that are recomputed
    counted: bytes of the peak, counted
    PIECES: ms predicted at measured rates; ``unaccounted`` is the rest of the step
    predicted_ms: their sum without the rest
    gained, predicted: ms that a step of the ladder is shorter than the one before, measured and
        predicted
    in ..., in collectives, in copies, in blocks: ms of a traced step's kernels by piece; of what
        runs beside them; of the blocks' matmuls
    in barriers: ms of barriers among the collectives
    in FP8, FP8 calls: ms and number of the matmuls of FP8 operands among them
    computing: ms of the kernels of TRACED, the sum
    """
    rates, bandwidth = ceilings(rows_of("ceiling")), copy_bandwidth(rows_of("ceiling"))
    attention = attention_rates(rows_of("flash"))
    lines = []
    for row in rows.itertuples():
        line = _counted(row)
        if rates.get(row.dtype) and bandwidth:
            line.update(_predicted(row, line, rates[row.dtype], bandwidth, attention))
        lines.append(line)
    rows = rows.join(pd.DataFrame(lines, rows.index)).assign(AdamW=rows["ms_optimizer"])
    explained = rows.reindex(columns=list(PIECES)[:-1]).sum(axis=1, skipna=False)
    peak = stated_peak(rows["device"].iloc[0])
    bf16_ms = rows["ms"].mask(rows["way"] == "fp8_ffn")
    rows["mfu"] = rows["flops"] / bf16_ms / 1e9 / peak
    rows["mfu_full"] = rows["full_flops"] / bf16_ms / 1e9 / peak
    repeated_flops = rows["repeated_matmuls"] + rows["repeated_attention"]
    rows["hfu"] = rows["mfu"] * (1 + repeated_flops / rows["flops"])
    rows = rows.assign(predicted_ms=explained, unaccounted=rows["ms"] - explained)
    rows = rows.sort_values("way", key=lambda way: way.map(list(CONFIGURATIONS).index))
    rows = rows.join(_traced(rows))
    in_computing = rows.reindex(columns=TRACED)
    rows["computing"] = in_computing.sum(axis=1, skipna=False)
    of_one_step = ["model", "layers", "batch", "context", "world_size"]
    shorter = -ladder(rows).groupby(of_one_step)[["ms", "predicted_ms"]].diff()
    return rows.assign(gained=shorter["ms"], predicted=shorter["predicted_ms"])


def ladder(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the LADDER's configurations."""
    return rows[rows["way"].isin(LADDER)]


def attention_rates(
    rows: pd.DataFrame, heads: int = 16, tokens: int = 16384
) -> dict[tuple[str, str], float]:
    """Return operations per ms of causal attention in bf16 with heads of 128, by implementation and
    pass. 16 heads with 16,384 tokens is the largest shape of many heads."""
    same = (rows["heads"] == heads) & (rows["head_dim"] == 128) & (rows["seq_len"] == tokens)
    rows = by_graph(rows[same & (rows["dtype"] == "bf16") & rows["causal"]])
    rates = {}
    for row in rows.to_dict("records"):
        flops = attention_flops(row["batch"], heads, tokens, tokens, 128, True, row["pass"])
        rates[row["implementation"], row["pass"]] = flops / row["ms"]
    return rates


def _shape(row) -> Shape:
    return dataclasses.replace(SIZES[row.model], num_layers=int(row.layers))


def _output_bytes(shape: Shape, tokens: int) -> int:
    """Return the bytes of a block's matmul outputs that its backward needs."""
    total = 0
    for output in block_results(shape, tokens, 1.0):
        total += output.bytes
    return total


def _counted(row) -> dict[str, float | None]:
    """Return the operations and bytes of one row, by counting."""
    shape, batch, context = _shape(row), int(row.batch), int(row.context)
    tokens = batch * context
    always = block_always(shape, tokens)
    outputs = shape.num_layers * _output_bytes(shape, tokens)
    is_fused = row.way not in ("recomputed", "attention_kept")
    is_baseline = row.way == "recomputed"
    table = 2 * shape.vocab_size * shape.d_model
    # Beside the blocks: embedding, output head and last block, gathered; the head's input, and its
    # output or that one's gradient; the head's gradient, which is made with the loss.
    beside = (3 if is_fused else 2) * table + 2 * shape.block_matrices + 2 * always[0]
    blocks = row.kept_bytes - beside
    state = STATE_BYTES.get(row.way, 12) * parameter_count(shape) / row.world_size
    again = shape.num_layers * sum(always) + outputs - blocks - row.host_bytes

    flops = forward_flops_by_part(shape, batch, context, causal=True)
    repeated_matmuls = flops["projections"] + flops["ffn"] if is_baseline else again * shape.d_model
    if not is_fused:
        repeated_matmuls += flops["lm_head"]
    repeated_attention = flops["attention"] if is_baseline else 0
    work = working_bytes(shape, tokens, CHUNK)
    if row.way == "fp8_ffn":
        work += fp8_bytes(shape, tokens)
    return {
        "flops": step_flops(shape, batch, context, causal=True),
        "full_flops": step_flops(shape, batch, context),
        "repeated_matmuls": repeated_matmuls,
        "repeated_attention": repeated_attention,
        "state": state,
        "blocks": blocks,
        "counted": state + blocks + work,
        "again_bytes": None if is_baseline else again,
    }


def _predicted(row, counted: dict, rate: float, bandwidth: float, attention: dict) -> dict:
    """Return the ms of one row's PIECES at measured rates: TFLOP/s of matmuls, TB/s, and those of
    ``attention_rates``; nothing where attention is not measured, and of FP8, which has no rate."""
    name = "a2lib" if row.attention == "flash" else row.attention
    forward_rate = attention.get((name, "forward"))
    backward_rate = attention.get((name, "backward"))
    if not forward_rate or not backward_rate or row.way == "fp8_ffn":
        return {}
    shape, batch, context = _shape(row), int(row.batch), int(row.context)
    flops = forward_flops_by_part(shape, batch, context, causal=True)["attention"]
    least = floor(fused_step(shape, batch, context, row.dtype), rate * 1e12, bandwidth * 1e12)
    recomputed = counted["repeated_matmuls"] / rate / 1e9
    recomputed += counted["repeated_attention"] / forward_rate
    return {
        "matmuls": least["products"].ms,
        "FlashAttention": flops / forward_rate + 2.5 * flops / backward_rate,
        "recomputed": recomputed,
        "elementwise": least["elementwise"].ms + least["loss"].ms,
    }


def _traced(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ms of each traced step's kernels by piece, a row for each of ``rows``."""
    by_way = {}
    for picture in pictures("kernels", rows).values():
        if picture.about.get("section") != "leaderboard":
            continue
        kernels = pd.DataFrame(picture.rows)
        name = kernels["kernel"]
        # Classes of today: the rows have those of when they were measured.
        kind = name.map(kind_of).where(name != "rest", kernels["kind"])
        piece = kind.map(CLASSES)
        piece = piece.fillna("elementwise").mask(kernels["phase"] == "optimizer", "AdamW")
        times = kernels["ms"].groupby("in " + piece).sum().to_dict()
        in_blocks = (kind == "matmul") & (kernels["calls"] >= int(picture.about["layers"]))
        times["in blocks"] = kernels["ms"][in_blocks].sum()
        times["in barriers"] = kernels["ms"][name.str.contains("barrier_kernel")].sum()
        in_fp8 = name.str.match(FP8_MATMUL)
        times["in FP8"] = kernels["ms"][in_fp8].sum()
        times["FP8 calls"] = kernels["calls"][in_fp8].sum()
        by_way[picture.about["way"], picture.run] = times
    steps = zip(rows["way"], rows["run"], strict=True)
    return pd.DataFrame([by_way.get(step, {}) for step in steps], rows.index)


def matmul_rate(rows: pd.DataFrame, way: str) -> float:
    """Return TFLOP/s of the matmuls in a configuration's traced step."""
    row = rows.set_index("way").loc[way]
    shape, batch, context = SIZES[row["model"]], int(row["batch"]), int(row["context"])
    attention = forward_flops_by_part(shape, batch, context, causal=True)["attention"]
    return (row["flops"] - 3 * attention) / row["in matmuls"] / 1e9


def ladder_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return run, step, gain and predicted gain of each configuration."""
    predicted = rows["predicted"].mask(rows["way"].isin(NO_PREDICTION))
    columns = {
        "configuration": rows["way"].map(CONFIGURATIONS),
        "run": rows["run"].map(run_letters(rows)),
        "step": rows["ms"].map(count),
        "gained": rows["gained"].map(count, na_action="ignore"),
        "predicted": predicted.map(count, na_action="ignore"),
    }
    return pd.DataFrame(columns)


def run_letters(rows: pd.DataFrame) -> dict[str, str]:
    """Return a letter for each run of the rows, A for the earliest."""
    runs = sorted(set(rows["run"]))
    return {run: ascii_uppercase[number] for number, run in enumerate(runs)}


def run_days(rows: pd.DataFrame) -> str:
    """Return the letters of the rows' runs by their day: "A and B: 2026-11-27, C: 2026-11-29"."""
    by_day = {}
    for run, letter in run_letters(rows).items():
        day = f"{pd.Timestamp(run.partition('-')[0]):%Y-%m-%d}"
        by_day.setdefault(day, []).append(letter)
    days = [f"{' and '.join(letters)}: {day}" for day, letters in by_day.items()]
    return ", ".join(days)


def loss_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out loss of trainings with the FFN in FP8 and in bf16, compiled and not: a
    line for each seed."""
    compiled = rows["compile"] == "blocks"
    names = rows["ffn"].map({"fp8": "FP8", "bf16": "bf16"})
    names = names.where(compiled, names + ", not compiled")
    losses = rows.assign(training=names).pivot(
        index="seed", columns="training", values="loss_held_out"
    )
    return losses[["bf16", "FP8", "bf16, not compiled"]]


def _with_one_decimal(share: float) -> str:
    return percent(share, 1)


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return peak, count, and what is offloaded and recomputed, of each configuration that changes
    the peak, and of the last."""
    rows = rows[~rows["way"].isin(SAME_PEAK)]
    above = rows["counted"] / rows["allocated_bytes"] - 1
    columns = {
        "configuration": rows["way"].map(CONFIGURATIONS),
        "peak": cells(rows["allocated_bytes"] / 1e9),
        "error": above.map(_with_one_decimal),
        "offloaded": cells(rows["host_bytes"] / 1e9),
        "recomputed": rows["products_again"].map(count, na_action="ignore").fillna("all"),
    }
    return pd.DataFrame(columns)


def times(rows: pd.DataFrame) -> Chart:
    """Draw seconds of a step by PIECES, a bar for each configuration, with its MFU."""
    frame = (rows.set_index("way")[list(PIECES)] / 1e3).rename(index=CONFIGURATIONS)
    # A column of the rows is called attention already.
    frame = frame.rename(columns={"FlashAttention": "attention"})
    colours = dict(zip(frame, PIECES.values(), strict=True))
    text = (rows["ms"] / 1e3).map("{:.2f} s, ".format) + rows["mfu"].map(percent)
    return stacks(frame, colours, 3.6, columns=3, text=text, least=0.15, xlabel="step, s")
