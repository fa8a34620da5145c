"""Rows of the compile chapter's sections, made by hand in round milliseconds."""

MADE = {"kernels_written": 1, "kernels_called": 1, "library_calls": 2, "attentions": 0}


def shape(implementation, pass_, ms, n=16384, d=64, gpu="", host="", **more):
    made = MADE if implementation == "compile" else {}
    return {
        "implementation": implementation, "written": "plain", "dtype": "fp32", "batch": 8,
        "seq_len": n, "head_dim": d, "pass": pass_, "ms": ms, "ms_p20": ms, "ms_p80": ms, "n": 9,
        "ms_graph": gpu, "ms_host": host, **made, **more,
    }  # fmt: skip


def both(n, eager, compiled, **more):
    """Forward and backward of a length: (forward, backward) in ms of each."""
    return [
        shape(name, pass_, ms, n, **more)
        for name, times in (("eager", eager), ("compile", compiled))
        for pass_, ms in zip(("forward", "backward"), times, strict=True)
    ]


GRID = both(1024, (2, 4), (3, 4)) + both(4096, (10, 20), (5, 19))
GRID += both(16384, (100, 300), (50, 100))


def step(way, forward, backward, cold=0, warm=0, model="small", context=512, precision="fp32"):
    """A train-step of forward, backward, 1 ms of loss and 9 of the optimizer; its first steps."""
    parts = {"forward": forward, "loss": 1, "backward": backward, "optimizer": 9}
    parts |= dict.fromkeys(("step", "wall"), sum(parts.values()))
    made = {**MADE, "kernels_called": 12, "library_calls": 34} if way != "none" else {}
    return [
        {"model": model, "context": context, "batch": 4, "mode": "train-step",
         "precision": precision, "attention": "eager", "compile": way, "phase": phase, "ms": ms,
         "ms_mean": ms, "ms_min": ms, "n": 10, **made,
         "ms_cold": ms + cold * (0.5 if phase in ("forward", "backward") else 1),
         "ms_warm": ms + warm}
        for phase, ms in parts.items()
    ]  # fmt: skip


STEPS = step("none", 30, 60, 50, 20) + step("model", 20, 20, 20020, 5020)


def replayed(ms, model="small", precision="fp32"):
    """An eager train-step as a CUDA graph, of the benchmark's rows."""
    return {"model": model, "context": 512, "batch": 4, "mode": "train-step", "compile": "none",
            "precision": precision, "attention": "eager", "capture": "true", "warmup": 5, "n": 10,
            "phase": "wall", "ms": ms, "ms_mean": ms}  # fmt: skip


def counted(rows_, bytes_):
    return [{**row, "moved_bytes": bytes_} if row["phase"] == "wall" else row for row in rows_]
