"""Invented rows in the shape of a complete sweep, for tests and for looking at the book's pages.

The figures obey a crude cost model (a fixed launch cost plus work over a rate) and describe no
machine. They are written into a folder of the caller's, never into the repository's data.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import a2lib.measure.runs as runs
from a2lib.measure import CEILING, FLASH, FLASH_ACCURACY, FLASH_COUNTERS, FLASH_PROTOCOL, SECTIONS
from a2lib.theory.attention import attention_flops

# implementation -> (launch cost in us, TFLOP/s forward, TFLOP/s backward) of the model, bf16
RATES = {
    "a2lib": (11, 380, 300), "eager": (28, 36, 34), "compile": (19, 80, 66),
    "sdpa_flash": (9, 300, 260), "sdpa_cudnn": (14, 450, 420), "sdpa_efficient": (10, 150, 110),
    "flex": (17, 350, 260),
}  # fmt: skip
FP32_SLOWER = 7
PASSES = ("forward", "backward", "end_to_end")
BOARD = ("bf16", 1, 16, 16384, 64, True)
RUN = "20261121T000000Z-nvidia-h200-000000"


def row(implementation, dtype, batch, heads, seq_len, head_dim, causal, pass_, run=RUN):
    """One row of the flash section as text, by the cost model."""
    key = {
        "implementation": implementation, "dtype": dtype, "batch": batch, "heads": heads,
        "seq_len": seq_len, "head_dim": head_dim, "causal": str(causal).lower(), "pass": pass_,
    }  # fmt: skip
    blank = dict.fromkeys(("ms", "ms_p20", "ms_p80", "n"), "")
    if dtype == "fp32" and implementation in ("sdpa_flash", "sdpa_cudnn"):
        note = "no fp32 kernel in this backend"
        return {**key, "note": note, **blank, "status": "unsupported", "run": run}
    quadratic = implementation in ("eager", "compile")
    width = 2 if dtype == "bf16" else 4
    elements = batch * heads * seq_len
    peak = elements * head_dim * width * 8
    if quadratic:
        peak += elements * seq_len * width * (2 if implementation == "compile" else 4)
    if peak > 60e9:
        note = "out of memory"
        return {**key, "note": note, **blank, "status": "oom", "run": run}
    launch, forward, backward = RATES[implementation]
    slower = (FP32_SLOWER if dtype == "fp32" else 1) * (64 / min(head_dim, 64)) ** 0.5
    ms = host = 0.0
    for part, rate, calls in (("forward", forward, 1), ("backward", backward, 3)):
        if pass_ in (part, "end_to_end"):
            flops = attention_flops(batch, heads, seq_len, seq_len, head_dim, causal, part)
            fill = min(1.0, elements / 128 / 132 + 0.02)
            host += calls * launch / 1e3
            ms += flops * slower / (rate * fill * 1e12) * 1e3
    gpu, ms = ms + 0.002, ms + host
    return {
        **key, "peak_bytes": peak, "ms_graph": f"{gpu:.6g}", "ms_host": f"{host:.6g}",
        "sm_mhz": 1900, "note": "", "status": "ok", "ms": f"{ms:.6g}",
        "ms_p20": f"{ms * 0.99:.6g}", "ms_p80": f"{ms * 1.02:.6g}", "n": 50, "run": run,
    }  # fmt: skip


def protocol_rows(run):
    """Rows of flash_protocol at the leaderboard's shape: each protocol by the same model."""
    for implementation in RATES:
        names = FLASH_PROTOCOL.key[1:-1]
        key = dict(zip(names, (implementation, *BOARD, "end_to_end"), strict=True))
        ms = float(row(implementation, *BOARD, "end_to_end")["ms"])
        for protocol, seconds in (("burst", (0,)), ("sustained", range(10)), ("board", (0,))):
            for second in seconds:
                slower = 1 if protocol == "burst" else 1 + second / 100
                yield {
                    **key, "causal": "true", "protocol": protocol, "second": second, "run": run,
                    "ms_mean": f"{ms * slower * 1.01:.6g}", "sm_mhz": 1980 - 20 * second,
                    "power_w": 650, "status": "ok", "ms": f"{ms * slower:.6g}", "n": 50,
                    "ms_p20": f"{ms * slower * 0.99:.6g}", "ms_p80": f"{ms * slower * 1.01:.6g}",
                }  # fmt: skip


def accuracy_rows(run):
    """Rows of flash_accuracy: an error that grows with the scale, cuDNN's least, without fp32."""
    for place, implementation in enumerate(("sdpa_cudnn", "a2lib", "eager")):
        for dtype, unit in (("bf16", 2**-8), ("fp32", 2**-23)):
            for scale in (1, 10):
                for d, tensor in ((d, t) for d in (64, 128) for t in ("o", "dq", "dk", "dv")):
                    made = dict(zip(FLASH_ACCURACY.key, (implementation, dtype, 1, 4, 2048, d,
                                    "true", scale, tensor), strict=True))  # fmt: skip
                    if dtype == "fp32" and implementation == "sdpa_cudnn":
                        yield {**made, "status": "unsupported", "note": "no fp32", "run": run}
                        continue
                    error = unit * (1 + place) * scale**0.5
                    yield {**made, "error": f"{error:.6g}", "error_max": f"{9 * error:.6g}",
                           "status": "ok", "run": run}  # fmt: skip


def counter_rows(run):
    """Rows of flash_counters: ours in one kernel forward and two backward, cuDNN in one each."""
    ours = {"forward": ("forward",), "backward": ("backward_dq", "backward_dkdv")}
    for d in (64, 128):
        for pass_, kernels in ours.items():
            names = {"a2lib": [f"{kernel}_kernel" for kernel in kernels], "sdpa_cudnn": ["cudnn"]}
            for implementation, launched in names.items():
                for launch, kernel in enumerate(launched):
                    made = dict(zip(FLASH_COUNTERS.key, (implementation, "bf16", 1, 16, 16384, d,
                                    "true", pass_, launch), strict=True))  # fmt: skip
                    half = 1 if implementation == "a2lib" else 2
                    yield {**made, "kernel": kernel, "device_bytes": 2 * d * 10**6,
                           "l2_bytes": d * 135 * 10**6 // half, "tensor_percent": 50,
                           "exp_percent": 3200 / d, "issue_percent": 40, "warps_percent": 15,
                           "status": "ok", "run": run}  # fmt: skip


def shapes(keep=lambda shape: True):
    """Every (implementation, dtype, batch, heads, seq_len, head_dim, causal, pass) of the sweep."""
    handout = [(t, 1, 1, 2**n, d, True) for t in ("bf16", "fp32") for d in (16, 32, 64, 128)
               for n in range(7, 17)]  # fmt: skip
    paper = [("bf16", 16384 // n, 2048 // d, n, d, causal) for d in (64, 128)
             for n in (512, 1024, 2048, 4096, 8192, 16384) for causal in (True, False)]  # fmt: skip
    for shape in [*handout, BOARD, *paper]:
        for implementation in RATES:
            for pass_ in PASSES:
                full = (implementation, *shape, pass_)
                if keep(full):
                    yield full


def write(root: Path, device="nvidia-h200", keep=lambda shape: True, ceiling=True) -> Path:
    """Write measured/<section> and measured/runs.csv of one device under `root`.

    `ceiling` says whether to write the sections beside flash as well.
    """
    run = RUN.replace("nvidia-h200", device)
    measured = Path(root) / "measured"
    _write(measured / "flash" / f"{device}.csv", FLASH.columns,
           [row(*shape, run=run) for shape in shapes(keep)])  # fmt: skip
    if ceiling:
        _write(measured / "flash_protocol" / f"{device}.csv", FLASH_PROTOCOL.columns,
               protocol_rows(run))  # fmt: skip
        _write(measured / "flash_accuracy" / f"{device}.csv", FLASH_ACCURACY.columns,
               accuracy_rows(run))  # fmt: skip
        _write(measured / "flash_counters" / f"{device}.csv", FLASH_COUNTERS.columns,
               counter_rows(run))  # fmt: skip
        made = [("matmul", "bf16", 4096, 0.2), ("matmul", "bf16", 8192, 1.4),
                ("matmul", "fp32", 8192, 21.0),
                ("copy", "bf16", 1 << 30, 0.5)]  # fmt: skip
        _write(measured / "ceiling" / f"{device}.csv", CEILING.columns, [
            {"operation": o, "dtype": t, "size": s, "sm_mhz": 1950, "note": "", "status": "ok",
             "ms": ms, "ms_p20": ms, "ms_p80": ms, "n": 10, "run": run}
            for o, t, s, ms in made])  # fmt: skip
    _run(Path(root), run, device)
    return Path(root)


def by_hand(root: Path, device="nvidia-h200", **sections) -> Path:
    """Write the rows given for each section (dictionaries of text or numbers) of one device.

    Columns left out are blank, but status is ok, and the run is one that runs.csv has.
    """
    run = RUN.replace("nvidia-h200", device)
    for name, rows in sections.items():
        made = [{"status": "ok", "run": run, **row} for row in rows]
        _write(Path(root) / "measured" / name / f"{device}.csv", SECTIONS[name].columns, made)
    _run(Path(root), run, device)
    return Path(root)


def _run(root: Path, run: str, device: str) -> None:
    known = {
        "run": run, "started": "2026-11-21T00:00:00Z", "device": device, "n_devices": 1,
        "driver": "0.0", "torch": "0.0-synthetic", "triton": "0.0", "cuda": "0.0", "cudnn": "0",
        "python": "3.11", "git": "synthetic", "command": "synthetic rows, measured on no machine",
        "parameters": json.dumps({"synthetic": True}),
    }  # fmt: skip
    known = {**dict.fromkeys(runs.COLUMNS, ""), **known}
    others = [r for r in runs.read_runs(root) if r["run"] != run]
    _write(root / "measured" / "runs.csv", runs.COLUMNS, [*others, known])


def _write(file: Path, columns, rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
