"""Time tiles of the attention kernels on this GPU, as the table in a2lib.attention.tiles was.

    python dev/tune_attention.py candidates.json results.jsonl

candidates.json maps "kernel/family/BD/causal" (forward/16bit/64/True) to tiles
[Bq, Bk, warps, stages]. Each is timed on one head (few programs) and on sixteen (many; eight in
fp32). Compilation runs ahead in other processes, one candidate each, so that one that brings its
compiler down costs only itself.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.testing import do_bench

from a2lib.attention import flash_attention, launches, tiles

SHAPES = {"16bit": [(1, 1, 8192), (1, 16, 8192)], "fp32": [(1, 1, 4096), (1, 8, 4096)]}
SMALL = [(1, 1, 256), (1, 16, 256)]


def last_launch(kernel, call):
    """A call of the last launch of a kernel of the table in ``call``, by Triton's own way."""
    launched, real = [], launches._launch_steps

    def record(steps, tensors, struck):
        launched.extend((step, tensors) for step in steps if step.kernel == kernel)
        return real(steps, tensors, struck)

    launches._launch_steps = record
    launches._kept.clear()
    try:
        call()
    finally:
        launches._launch_steps = real
    step, tensors = launched[-1]
    return lambda: launches.compile_and_launch(step, tensors)


def run(key, tile, shapes, rep):
    """Milliseconds of one kernel with one tile, by shape; rep is do_bench's, 0 only compiles."""
    kernel, family, BD, causal = key.split("/")
    BD, causal = int(BD), causal == "True"
    tiles.TILES[kernel, family, BD] = [tiles.Row(kernel, family, (BD,), tiles.Tile(*tile))]
    dtype = torch.bfloat16 if family == "16bit" else torch.float32
    times = {}
    for batch, heads, n in shapes:
        q, k, v, do = (torch.randn(batch, heads, n, BD, device="cuda").to(dtype) for _ in range(4))

        def call(q=q, k=k, v=v, do=do):
            for x in (q, k, v):
                x.requires_grad_(not kernel.startswith("forward"))
            o = flash_attention(q, k, v, is_causal=causal)
            if not kernel.startswith("forward"):
                torch.autograd.grad(o, (q, k, v), do)

        again = last_launch(kernel, call)
        if rep:
            times[f"{heads}x{n}"] = do_bench(again, warmup=5, rep=rep, return_mode="median")
    return times


def precompile(job):
    """Fill Triton's cache with one candidate, in a process of its own."""
    code = f"import sys; sys.path.insert(0, 'dev'); import tune_attention as t; t.run(*{job!r}, "
    subprocess.run(
        [sys.executable, "-c", code + "t.SMALL, 0)"], stderr=subprocess.DEVNULL, timeout=240
    )


def main(candidates_path, results_path):
    with open(candidates_path) as f:
        jobs = [(key, tile) for key, candidates in json.load(f).items() for tile in candidates]
    # All compiled before any is timed: another process on the GPU would show in the times.
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(precompile, jobs))
    with open(results_path, "a") as results:
        for key, tile in jobs:
            row = {"kernel": key, "tile": tile}
            try:
                row["ms"] = run(key, tile, SHAPES[key.split("/")[1]], 30)
            except Exception as error:
                row["error"] = str(error)[:300]
            print(json.dumps(row), file=results, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
