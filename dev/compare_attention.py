"""Time the attention of two source trees on one GPU, in turns, beside PyTorch's own.

    git archive main src | tar -x -C build/main
    python dev/compare_attention.py build/main/src src

Each tree runs in processes of its own, in turns. Prints the GPU's time of a forward and of both
passes, replayed from a CUDA graph, and the host's time of a call beside that of
scaled_dot_product_attention (FlashAttention-2, efficient in fp32), then the second tree's times by
the first's.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

TURNS = 3
# batch, heads, heads of keys, tokens, head size, dtype, causal, in a fixed order
SHAPES = {
    "leaderboard": (1, 16, 16, 16384, 64, "bfloat16", True, False),
    "leaderboard, 128": (1, 16, 16, 16384, 128, "bfloat16", True, False),
    "no mask, 64": (2, 32, 32, 4096, 64, "bfloat16", False, False),
    "no mask, 128": (2, 16, 16, 4096, 128, "bfloat16", False, False),
    "short rows, 64": (32, 32, 32, 512, 64, "bfloat16", True, False),
    "short rows, 128": (32, 16, 16, 512, 128, "bfloat16", True, False),
    "one head, 128": (1, 1, 1, 128, 64, "bfloat16", True, False),
    "one head, 512": (1, 1, 1, 512, 64, "bfloat16", True, False),
    "one head, 2048, 128": (1, 1, 1, 2048, 128, "bfloat16", True, False),
    "one head, 16384": (1, 1, 1, 16384, 64, "bfloat16", True, False),
    "grouped": (2, 32, 8, 4096, 128, "bfloat16", True, False),
    "deterministic": (1, 16, 16, 16384, 64, "bfloat16", True, True),
    "deterministic, short": (4, 16, 16, 512, 64, "bfloat16", True, True),
    "fp32, 64": (1, 8, 8, 2048, 64, "float32", True, False),
    "fp32, 128": (1, 8, 8, 2048, 128, "float32", True, False),
}
HOST = ("one head, 128", "one head, 512", "short rows, 64", "grouped", "fp32, 64")


def measure():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils import deterministic

    from a2lib.attention import flash_attention

    deterministic.fill_uninitialized_memory = False
    for name, (batch, heads, kv_heads, n, d, dtype, causal, ordered) in SHAPES.items():
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(ordered)
        options = {"device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": True}
        q, k, v = (torch.randn(batch, h, n, d, **options) for h in (heads, kv_heads, kv_heads))
        do = torch.randn_like(q).detach()

        def ours(q, k, v, causal=causal):
            return flash_attention(q, k, v, is_causal=causal)

        def theirs(q, k, v, causal=causal, grouped=heads > kv_heads):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        row = {"shape": name}
        for passes, call in calls(ours, q, k, v, do).items():
            row[f"{passes} ms"] = replayed(call)
        if name in HOST:
            backend = SDPBackend.EFFICIENT_ATTENTION if dtype == "float32" else None
            with sdpa_kernel(backend or SDPBackend.FLASH_ATTENTION):
                for who, attend in (("a2lib", ours), ("sdpa", theirs)):
                    for passes, call in calls(attend, q, k, v, do).items():
                        row[f"{who} {passes} host us"] = host(call)
                    with torch.no_grad():
                        row[f"{who} no grad host us"] = host(functools.partial(attend, q, k, v))
        print(json.dumps(row), flush=True)


def calls(attend, q, k, v, do):
    import torch

    return {
        "forward": lambda: attend(q, k, v),
        "both": lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do),
    }


def replayed(call, repeats=20):
    """The median time of a replay, in ms."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def host(call, n=20, turns=25):
    """The median time in which a call returns, in us; few wait in the GPU's queue at a time."""
    import torch

    times = []
    for _ in range(turns):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            call()
        times.append((time.perf_counter() - start) / n * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def main(*trees):
    rows = {tree: {} for tree in trees}
    for turn in range(TURNS):
        for tree in trees if turn % 2 == 0 else reversed(trees):
            env = os.environ | {"PYTHONPATH": os.path.abspath(tree)}
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                row = json.loads(line)
                shape = rows[tree].setdefault(row.pop("shape"), {})
                for column, value in row.items():
                    shape.setdefault(column, []).append(value)
    first, second = (rows[tree] for tree in trees)
    for shape, columns in first.items():
        for column, values in columns.items():
            a, b = statistics.median(values), statistics.median(second[shape][column])
            print(f"{shape:22} {column:24} {a:9.4f} {b:9.4f} {b / a:6.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    else:
        main(*sys.argv[1:])
