"""Attention of two trees in one process, in turns: results, GPU time and host time.

    git archive main src | tar -x -C build/main
    python dev/compare_attention.py build/main/src src --seconds 400

Needs a GPU. Each tree is imported under a name of its own, from a copy. Results have to be equal to
the bit, or as close as an order of additions that is not fixed leaves them; exits with 1 where they
are not. GPU time is that of a CUDA graph's replay, host time that of a call that waits for nothing,
with PyTorch's own attention beside it. Ratios are of medians over turns in random order.
"""

import argparse
import importlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

# dtype, batch, heads, heads of keys, tokens, head size, causal
SHAPES = [
    ("bfloat16", 1, 1, 1, 128, 64, True),
    ("bfloat16", 1, 1, 1, 512, 64, True),
    ("bfloat16", 1, 1, 1, 4096, 128, True),
    ("bfloat16", 32, 16, 16, 512, 64, True),
    ("bfloat16", 4, 32, 8, 1024, 128, True),
    ("bfloat16", 1, 16, 16, 16384, 64, True),
    ("bfloat16", 2, 16, 16, 4096, 128, False),
    ("float16", 8, 16, 16, 2048, 80, False),
    ("bfloat16", 16, 8, 8, 512, 32, True),
    ("float32", 1, 8, 8, 2048, 64, True),
    ("float32", 1, 8, 8, 1024, 128, False),
]
CALLS = 20  # of a turn
ALLOWED = {"bfloat16": 2e-3, "float16": 5e-4, "float32": 1e-6}  # of norms, where bits differ


def attention_of(src, name):
    """The function of a tree, as package ``name``: operators of one name cannot be two."""
    folder = Path(tempfile.mkdtemp(prefix="compare-attention-"))
    shutil.copytree(Path(src) / "a2lib", folder / name)
    for path in (folder / name).rglob("*.py"):
        path.write_text(path.read_text().replace("a2lib", name))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}.attention").flash_attention, folder


def calls_of(attention, qkv, do, causal):
    """Return what is timed: forward without gradients, forward with, and both passes."""
    frozen = [x.detach() for x in qkv]

    def both():
        o = attention(*qkv, is_causal=causal)
        return o, *torch.autograd.grad(o, qkv, do)

    return {
        "no gradient": lambda: (attention(*frozen, is_causal=causal),),
        "forward": lambda: (attention(*qkv, is_causal=causal),),
        "both": both,
    }


def replay_of(call):
    """A CUDA graph of a call that has been warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host_us(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - begin) / CALLS * 1e6


def gpu_us(replay):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(CALLS):
        replay()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / CALLS * 1e3


def median_of_turns(measure, calls, seconds):
    """Medians of ``measure(call)`` by name, in turns of random order for so many seconds."""
    samples, end = {name: [] for name in calls}, time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, samples.values())) < 3:
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(measure(calls[name]))
    return {name: statistics.median(x) for name, x in samples.items()}


def difference(first, second):
    return max(
        0.0 if torch.equal(x, y) else ((x.double() - y.double()).norm() / x.double().norm()).item()
        for x, y in zip(first, second, strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--seconds", type=float, default=300)
    given = parser.parse_args()
    trees = [attention_of(given.old, "a2lib_old"), attention_of(given.new, "a2lib_new")]
    (old, _), (new, _) = trees
    share = given.seconds / len(SHAPES) / 5  # of three host times and two GPU times
    ratios, wrong = {"gpu": [], "host": [], "host by SDPA": []}, 0
    for dtype, batch, heads, kv_heads, n, d, causal in SHAPES:
        options = {"device": "cuda", "dtype": getattr(torch, dtype)}
        q, do = torch.randn(2, batch, n, heads, d, **options).transpose(2, 3)
        k, v = torch.randn(2, batch, n, kv_heads, d, **options).transpose(2, 3)
        qkv = [x.requires_grad_() for x in (q, k, v)]

        def sdpa(q, k, v, is_causal):
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

        calls = {"old": old, "new": new, "sdpa": sdpa}
        calls = {name: calls_of(call, qkv, do, causal) for name, call in calls.items()}
        found = difference(calls["old"]["both"](), calls["new"]["both"]())
        again = difference(calls["old"]["both"](), calls["new"]["both"]())  # what was kept
        off = max(found, again)
        wrong += not off <= ALLOWED[dtype]
        print(f"{dtype}, {batch} x {heads}/{kv_heads} x {n} x {d}, causal {causal}: "
              f"{'equal' if off == 0 else f'off by {off:.1e}'}", flush=True)  # fmt: skip
        for pass_ in ("no gradient", "forward", "both"):
            mine = {name: of_pass[pass_] for name, of_pass in calls.items()}
            host = median_of_turns(host_us, mine, share)
            ratios["host"].append(host["new"] / host["old"])
            ratios["host by SDPA"].append(host["new"] / host["sdpa"])
            line = "old {old:7.1f}, new {new:7.1f}, SDPA {sdpa:7.1f} us".format(**host)
            print(f"  host {pass_:12} {line}, {ratios['host'][-1]:5.2f} of old")
            if pass_ == "forward":
                continue
            replays = {name: replay_of(mine[name]) for name in ("old", "new")}
            gpu = median_of_turns(gpu_us, replays, share)
            ratios["gpu"].append(gpu["new"] / gpu["old"])
            line = "old {old:7.1f}, new {new:7.1f} us".format(**gpu)
            print(f"  GPU  {pass_:12} {line},{' ' * 17}{ratios['gpu'][-1]:5.2f} of old", flush=True)
    for name, found in ratios.items():
        mean = statistics.geometric_mean(found)
        print(f"{name}: mean {mean:.3f}, from {min(found):.2f} to {max(found):.2f}")
    for _, folder in trees:
        shutil.rmtree(folder)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
