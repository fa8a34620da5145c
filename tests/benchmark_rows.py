"""Rows of the benchmark's sections, made by hand in round milliseconds."""

WAYS = {
    "plain": {},
    "autocast": {"precision": "bf16"},
    "ours": {"precision": "bf16", "attention": "flash", "compile": "blocks"},
    "peer": {"precision": "bf16", "attention": "sdpa_flash", "compile": "blocks"},
    "eager ours": {"precision": "bf16", "attention": "flash"},
}
# 2 * 8192**3 operations at 50 and at 800 TFLOP/s, 2 * 2**30 bytes at 4 TB/s.
CEILING = [
    {"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
    {"operation": "matmul", "dtype": "bf16", "size": 8192, "ms": 2 * 8192**3 / 800e9},
    {"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 2 * 2**30 / 4e9},
]


def key(model="2.7B", context=512, mode="train-step", way="plain", capture="false", **over):
    return {
        "model": model, "context": context, "batch": 4, "mode": mode, "precision": "fp32",
        "attention": "eager", "compile": "none", **WAYS[way], "capture": capture, **over,
    }  # fmt: skip


def times(forward, backward, optimizer, host=None, std=1, **where):
    """The rows of one configuration, whose wall time is one more than the sum."""
    parts = {"forward": forward, "backward": backward, "optimizer": optimizer}
    whole = forward + backward + optimizer
    parts |= {"step": whole, "wall": whole + 1}
    return [
        {**key(**where), "warmup": 5, "phase": phase, "ms": ms, "ms_mean": ms, "ms_std": std,
         "ms_min": ms, "ms_host": host if phase == "step" else "", "n": 10,
         "peak_bytes": 60 * 10**9}
        for phase, ms in parts.items()
    ]  # fmt: skip


def whole(ms, **where):
    """The rows of a captured configuration."""
    return [{**key(capture="true", **where), "warmup": 5, "phase": phase, "ms": ms + more,
             "ms_mean": ms + more, "ms_std": 0.5, "ms_min": ms, "n": 10}
            for phase, more in (("step", 0), ("wall", 1))]  # fmt: skip


def refused(status="oom", note="not tried", **where):
    return [{**key(**where), "warmup": 5, "phase": phase, "status": status, "note": note}
            for phase in ("forward", "backward", "optimizer", "step", "wall")]  # fmt: skip


def steps(walls, warmup, model="small"):
    return [
        {**key(model=model, context=128), "warmup": warmup, "step_number": i, "phase": phase,
         "ms": wall * share, "n": 1}
        for i, wall in enumerate(walls)
        for phase, share in (("wall", 1), ("forward", 0.25))
    ]  # fmt: skip


def first(prepared, first_ms, steady=10, repeat=0, **where):
    named = {"import": 2000, "first": first_ms, "second": steady, "steady": steady}
    named |= {"context": 300} if prepared == "nothing" else {}
    return [{**key(model="small", context=128, **where), "prepared": prepared, "repeat": repeat,
             "part": name, "ms": ms, "n": 1} for name, ms in named.items()]  # fmt: skip


def lines(table):
    return {tuple(row[:2]): row[2:] for row in table.frame.astype(str).values.tolist()}
