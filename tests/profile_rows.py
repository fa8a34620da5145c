"""A trace by hand, and rows of it, for the tests of the chapter on the kernels of a step."""

from a2lib.measure import bulk
from a2lib.report.chapters.profile.rows import Profile

KEY = {"model": "small", "context": 512, "batch": 4, "mode": "train-step", "precision": "fp32",
       "attention": "eager", "compile": "none", "profiler": "nsys"}  # fmt: skip
NAMES = ("model", "context", "batch", "mode", "precision", "attention", "compile", "profiler")
SCORES = "attn.attention.scores"
# phase, part, kind, kernel, calls, ms: the products, 109 forward and 218 backward, of 12 blocks.
STEP = [
    ("forward", "ffn.w1", "matmul", "gemm_a", 84, 50.0),
    ("forward", "lm_head", "matmul", "gemm_a", 1, 5.0),
    ("forward", SCORES, "matmul", "gemm_b", 12, 10.0),
    ("forward", "attn.attention.values", "matmul", "gemm_b", 12, 10.0),
    ("forward", SCORES, "elementwise", "mask", 24, 4.0),
    ("forward", "attn.attention.softmax", "softmax", "soft", 12, 16.0),
    ("forward", "attn", "copy", "rest", 12, 5.0),
    ("loss", "loss", "loss", "nll", 1, 10.0),
    ("backward", "ffn.w1", "matmul", "gemm_c", 218, 130.0),
    ("backward", "ffn.w1", "matmul", "splitKreduce", 30, 5.0),
    ("backward", "ffn", "elementwise", "mul", 100, 55.0),
    ("optimizer", "optimizer", "optimizer", "adam", 1, 50.0),
]
# 2 * 8192**3 operations at 50 TFLOP/s, 2 * 2**30 bytes at 4 TB/s.
CEILING = [
    {"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
    {"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 2 * 2**30 / 4e9},
]


def row(phase="step", ms=350.0, **over):
    """A row whose other times are the trace's, unless given."""
    made = {**KEY, "phase": phase, "ms": ms, "ms_timer": ms, "ms_traced": ms, "ms_busy": ms,
            "ms_range": ms, "ms_host": ms / 2, "ms_launching": ms / 10, "us_queued": 90,
            "launches": 100, "no_launch_percent": 0, "no_range_percent": 0,
            "no_class_percent": 0.5, "n": 3}  # fmt: skip
    return made | over


def forward(context, ms=10.0, **over):
    return row("forward", ms, context=context, mode="forward", **over)


def lines(table, keys=2):
    return {tuple(r[:keys]): r[keys:] for r in table.frame.astype(str).values.tolist()}


def chapter(synthetic, data, rows=(), *traces, **sections):
    """The chapter over these rows and traces, each the changes of KEY and its kernels."""
    synthetic.by_hand(data, profile=rows or [row()], ceiling=CEILING, **sections)
    for over, kernels in traces:
        key = KEY | over
        total = sum(k[-1] for k in kernels)
        columns = ("phase", "part", "kind", "kernel", "calls", "ms")
        found = [
            {**dict(zip(columns, k, strict=True)), "median_us": 1.0, "share": k[-1] / total}
            for k in kernels
        ]
        bulk.put("kernels", "nvidia-h200", "-".join(str(key[n]) for n in NAMES), found,
                 run=synthetic.RUN, about=key | {"source": "nsys"}, data=data)  # fmt: skip
    return Profile([data])
