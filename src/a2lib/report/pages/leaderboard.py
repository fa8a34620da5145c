"""The leaderboard's step: what each way's time and bytes should be made of, beside its rows."""

import dataclasses

import pandas as pd

from a2lib.lab.kernel_names import kind_of
from a2lib.report.metrics import by_graph, ceilings, copy_bandwidth, stated_peak
from a2lib.report.plots import stacks
from a2lib.report.style import Chart
from a2lib.report.traces import pictures
from a2lib.report.units import percent
from a2lib.theory.attention import attention_flops
from a2lib.theory.memory.keeping import CHUNK, block_always, block_results, working_bytes
from a2lib.theory.roofline import floor
from a2lib.theory.step_floor import fused_step
from a2lib.theory.transformer import SIZES, forward_flops_by_part, parameter_count, step_flops

WAYS = {
    "recomputed": "PyTorch's parts",
    "attention_kept": "+ attention kept",
    "fused_head": "+ loss in the head",
    "own_fsdp": "+ our FSDP",
    "products_kept": "+ multiplies kept",
    "offloaded": "+ the rest on the host",
    "own_attention": "+ our attention",
}
PIECES = {"matrix multiplies": "#0072b2", "FlashAttention": "#d55e00", "computed again": "#b0558a"}
PIECES |= {"other passes": "#00825f", "AdamW": "#444444", "beyond": "#808080"}
# The piece that a kernel of a trace is of, by its class, and what runs beside the pieces.
CLASSES = {"matmul": "matrix multiplies", "attention": "FlashAttention"}
BESIDE = {"communication": "messages", "copy": "copies"}
HELD = {"state": "#0072b2", "kept by blocks": "#d55e00", "all else": "#808080"}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows in the ladder's order with, of a GPU, ``tflops``, its share ``mfu`` of the maker's
    peak, ``best`` of the best measured multiply; in bytes ``state``, fp32 masters and moments,
    ``blocks``, what forward leaves of them, ``again_bytes``, their multiplies' results that are
    made again, ``counted``, the peak; in ms PIECES, by count at measured rates (``beyond``: what
    they do not explain), what the way has ``gained`` and what by them was ``expected``; and of a
    step that is traced the ms of its kernels, ``in <piece>``, ``in messages`` and ``in copies``,
    and of its multiplies those ``in blocks``."""
    rates, bandwidth = ceilings(rows_of("ceiling")), copy_bandwidth(rows_of("ceiling"))
    reached = attention_rates(rows_of("flash"))
    counts = [_counted(r, rates.get(r.dtype), bandwidth, reached) for r in rows.itertuples()]
    rows = rows.join(pd.DataFrame(counts, rows.index)).assign(AdamW=rows["ms_optimizer"])
    known = rows.reindex(columns=list(PIECES)[:-1]).sum(axis=1, skipna=False)
    rows["tflops"] = rows["flops"] / rows["ms"] / 1e9
    rows["mfu"] = rows["tflops"] / stated_peak(rows["device"].iloc[0])
    rows["best"] = rows["tflops"] / rows["dtype"].map(rates)
    rows = rows.assign(known=known, beyond=rows["ms"] - known)
    rows = rows.sort_values("way", key=lambda way: way.map(list(WAYS).index))
    rows = rows.join(_traced(rows))
    steps = rows.groupby(["model", "layers", "batch", "context", "world_size"])[["ms", "known"]]
    return rows.assign(**(-steps.diff()).set_axis(["gained", "expected"], axis=1))


def attention_rates(rows: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Operations a ms of causal attention in bf16, 16 heads of 128 and 16,384 tokens, by
    implementation and pass."""
    same = (rows["heads"] == 16) & (rows["head_dim"] == 128) & (rows["seq_len"] == 16384)
    rows = by_graph(rows[same & (rows["dtype"] == "bf16") & rows["causal"]])
    sizes = 16, 16384, 16384, 128, True
    return {
        (r["implementation"], r["pass"]): attention_flops(r["batch"], *sizes, r["pass"]) / r["ms"]
        for r in rows.to_dict("records")
    }


def _counted(row, rate: float | None, bandwidth: float | None, reached: dict) -> dict:
    shape = dataclasses.replace(SIZES[row.model], num_layers=int(row.layers))
    at, tokens = (shape, int(row.batch), int(row.context)), int(row.batch) * int(row.context)
    always, fused = block_always(shape, tokens), row.way not in ("recomputed", "attention_kept")
    products = shape.num_layers * sum(one.bytes for one in block_results(shape, tokens, 1.0))
    table = 2 * shape.vocab_size * shape.d_model
    # Beside blocks: embedding, head and last block, gathered; the head's input, and what comes out
    # or its gradient; the head's gradient, which is made with the loss.
    beside = (3 if fused else 2) * table + 2 * shape.block_matrices + 2 * always[0]
    blocks, state = row.kept_bytes - beside, 12 * parameter_count(shape) / row.world_size
    again = shape.num_layers * sum(always) + products - blocks - row.host_bytes
    found = {"flops": step_flops(*at, causal=True), "state": state, "blocks": blocks}
    found["counted"] = state + blocks + working_bytes(shape, tokens, CHUNK)
    whole = row.way == "recomputed"
    found |= {"products": products, "again_bytes": None if whole else again}
    name = {"flash": "a2lib"}.get(row.attention, row.attention)
    if not (rate and bandwidth and {(name, "forward"), (name, "backward")} <= set(reached)):
        return found
    flops = forward_flops_by_part(*at, causal=True)
    once = flops["attention"] / reached[name, "forward"]
    least = floor(fused_step(*at, row.dtype), rate * 1e12, bandwidth * 1e12)
    repeated = flops["projections"] + flops["ffn"] if whole else again * shape.d_model
    repeated += 0 if fused else flops["lm_head"]
    return found | {
        "matrix multiplies": least["products"].ms,
        "FlashAttention": once + 2.5 * flops["attention"] / reached[name, "backward"],
        "computed again": repeated / rate / 1e9 + (once if whole else 0),
        "other passes": least["elementwise"].ms + least["loss"].ms,
    }


def _traced(rows: pd.DataFrame) -> pd.DataFrame:
    """Ms of a trace's kernels by piece, a row for each of ``rows``."""
    found = {}
    for p in pictures("kernels", rows).values():
        if p.about.get("section") == "leaderboard":
            kernels = pd.DataFrame(p.rows)
            name = kernels["kernel"]
            # Today's: the rows have the classes of when they were measured.
            kind = name.map(kind_of).where(name != "rest", kernels["kind"])
            piece = kind.map(CLASSES | BESIDE).fillna("other passes")
            piece = "in " + piece.mask(kernels["phase"] == "optimizer", "AdamW")
            in_blocks = (kind == "matmul") & (kernels["calls"] >= int(p.about["layers"]))
            ms = kernels["ms"].groupby(piece).sum().to_dict()
            found[p.about["way"], p.run] = ms | {"in blocks": kernels["ms"][in_blocks].sum()}
    return pd.DataFrame([found.get((r.way, r.run), {}) for r in rows.itertuples()], rows.index)


def times(rows: pd.DataFrame) -> Chart:
    """Seconds of a step by PIECES, a bar for each way, with its share of the peak."""
    frame = (rows.set_index("way")[list(PIECES)] / 1e3).rename(index=WAYS)
    text = [f"{r.ms / 1e3:.2f} s, {percent(r.mfu)}" for r in rows.itertuples()]
    return stacks(frame, PIECES, 3.6, columns=3, text=text, least=0.15, xlabel="a step, s")


def memory(rows: pd.DataFrame) -> Chart:
    """GB at the peak, a bar for each way; at its end all of it, and in brackets the count."""
    rows = rows.set_index("way").rename(index=WAYS)
    rest = rows["allocated_bytes"] - rows["state"] - rows["blocks"]
    held = zip(HELD, (rows["state"], rows["blocks"], rest), strict=True)
    both = zip(rows["allocated_bytes"], rows["counted"], strict=True)
    text = [f"{a / 1e9:.0f} ({c / 1e9:.0f})" for a, c in both]
    frame = pd.DataFrame(dict(held)).astype(float) / 1e9
    return stacks(frame, HELD, 3.4, columns=3, text=text, xlabel="GB of a GPU")
