"""Rows of the FFN by hand, and of all-reduces, for the tests of "Paper beside hardware"."""

from a2lib.report.chapters.parallelism_measured import Beside
from a2lib.theory.latency import Line

MB, GIB = 2**20, 2**30


def row(scheme, pass_, tokens, ms, without, sent="", d_ff=1000, **over):
    mesh = {"dp": "2x1", "fsdp": "2x1", "tp": "1x2"}.get(scheme)
    return {
        "scheme": scheme, "implementation": "a2lib", "mesh": mesh, "backend": "nccl",
        "world_size": 2, "dtype": "bf16", "layers": 2, "d_model": 1000, "d_ff": d_ff,
        "tokens": tokens, "pass": pass_, "ms": ms, "ms_p20": ms, "ms_p80": ms, "n": 9,
        "ms_without": without, "ms_communication": sent, "note": "", **over,
    }  # fmt: skip


# Two layers of 1,000 by 1,000 on two ranks at C = 1 TFLOP/s and W = 1 GB/s. A product over B tokens
# has 2e6 B operations, so that a pass takes 6 B (forward) or 12 B (backward) microseconds in all. A
# layer's gradients are 6 MB and, of two ranks, as long on the wire: 6 ms, for both layers 12.
BY_BATCH = [
    row("dp", "forward", 500, 3, 3), row("dp", "forward", 2000, 12, 12),
    row("dp", "backward", 500, 15, 6, 12), row("dp", "backward", 2000, 33, 24, 12),
    row("dp", "end_to_end", 500, 18, 9, 12), row("dp", "end_to_end", 2000, 42, 36, 12),
    # A gather is 3 ms a layer; at 500 tokens as long as what it should hide behind takes twice.
    row("fsdp", "forward", 500, 7.5, 3, 6), row("fsdp", "forward", 2000, 18, 12, 6),
    row("fsdp", "backward", 500, 13.5, 6, 12), row("fsdp", "backward", 2000, 30, 24, 6),
]  # fmt: skip
# Of 1,000 tokens 2 MB pass for each sum: 4 ms in all, either pass. Forward 6 ms at 1,000 columns.
BY_WIDTH = [
    row("tp", "forward", 1000, 8, 6, 4), row("tp", "forward", 1000, 5, 1.5, 4, d_ff=250),
    row("tp", "backward", 1000, 14, 12, 4), row("tp", "backward", 1000, 5, 3, 4, d_ff=250),
]  # fmt: skip

LINE = Line(20e-6, 200e9)


def collective(size, line=LINE, n=2):
    ms = 1e3 * line.time_s(size)
    return {"operation": "all_reduce", "backend": "nccl", "world_size": n, "dtype": "fp32",
            "size": size, "ms": 2 * ms, "n": 9, "ms_queued": ms, "note": ""}  # fmt: skip


def sent(n=2):
    return [collective(s * MB, n=n) for s in (1, 4, 25, 100, 1024)]


def lines(table, keys):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def chapter(synthetic, data, rows, device="nvidia-h200", **sections):
    """The chapter over these rows, and over those of other sections by name."""
    return Beside([synthetic.by_hand(data, device=device, parallelism=rows, **sections)])
