"""Attention of random shapes as the library dispatches it, gradients by name against float64.

    python dev/random_attention.py 1000 [--seed 0]

Needs a GPU. New memory is full of NaN. Each shape runs as it comes, then by what was kept, then
replayed from a CUDA graph, and every twentieth also compiled; without PyTorch's caching of memory,
as for compute-sanitizer, only called. Prints how often each kernel was launched and the worst
errors, after an interrupt those until then (`timeout --foreground`, or ptxas is interrupted too);
exits with 1 where one is too large.
"""

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attention_compare import (
    LAYOUTS,
    errors,
    in_float64,
    keys_for,
    laid_out,
    random_inputs,
    with_gradients,
)

from a2lib.attention import FlashAttentionTriton, flash_attention, launches

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SCORES = 2**26  # at most, of all heads


def draw_shapes(draw):
    """Shapes of q and of k and v, few heads of many tokens or many of few."""
    head_dim = draw.choice([16, 32, 64, 128, 8 * draw.randint(2, 16), draw.randint(1, 128)])
    n_queries = round(2 ** draw.uniform(0, 13))
    n_keys = n_queries if draw.random() < 0.5 else round(2 ** draw.uniform(1, 13))
    group, most = draw.choice([1, 1, 2]), SCORES // (n_queries * n_keys)
    kv_heads = draw.randint(1, max(1, min(16, most // group)))
    batch = draw.randint(1, max(1, min(4, most // (group * kv_heads))))
    q_shape = (batch, kv_heads * group, n_queries, head_dim)
    return q_shape, (batch, kv_heads, keys_for(n_queries, n_keys), head_dim)


def count(launched):
    """Count the kernels that are launched the long way, as each shape's first are."""
    real = launches._launch_steps

    def launch(steps, *rest):
        launched.update(step.kernel for step in steps)
        return real(steps, *rest)

    launches._launch_steps = launch


def called(*inputs):
    """Output and gradients, into memory that was full of NaN."""
    held = [torch.full((2**n,), torch.nan, device="cuda") for n in range(12, 25)]
    del held
    return with_gradients(FlashAttentionTriton.apply, *inputs)


def replayed(*inputs):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = with_gradients(FlashAttentionTriton.apply, *inputs)
    for result in results.values():
        result.fill_(torch.nan)
    graph.replay()
    return results


def compiled(*inputs):
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def attention(q, k, v, is_causal):
        return flash_attention(q, k, v, is_causal=is_causal)

    return with_gradients(attention, *inputs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    launched, worst, wrong, runs = Counter(), {}, 0, Counter()
    count(launched)
    uncached = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
    try:
        for i in range(given.runs):
            draw = random.Random(f"{given.seed} {i}")
            torch.manual_seed(i)
            (q_shape, kv_shape), is_causal = draw_shapes(draw), draw.random() < 0.7
            dtype, layout = draw.choice(list(TOLERANCE)), draw.choice(LAYOUTS)
            inputs = random_inputs(q_shape, kv_shape, dtype, "cuda")
            truth = in_float64(*inputs, is_causal)
            inputs = [laid_out(x, layout) for x in inputs]
            others = () if uncached else (replayed,) if i % 20 else (replayed, compiled)
            shape = f"{dtype}, q {q_shape}, k and v {kv_shape}, {layout}, causal {is_causal}"
            for way in (called, called, *others):
                runs[way.__name__] += 1
                try:
                    found = errors(way(*inputs, is_causal), truth)
                except RuntimeError:
                    print(f"run {i}, {way.__name__}: {shape}", flush=True)
                    raise
                for name, error in found.items():
                    worst[dtype, name] = max(worst.get((dtype, name), 0), error)
                    if not error <= TOLERANCE[dtype]:
                        wrong += 1
                        print(f"run {i}, {way.__name__}: {name} is off by {error:.1e}: {shape}",
                              flush=True)  # fmt: skip
    except KeyboardInterrupt:
        pass
    for name, n in sorted((runs + launched).items()):
        print(f"{n:6d} {name}")
    for (dtype, name), error in sorted(worst.items(), key=str):
        print(f"{error:.1e} {dtype} {name}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
