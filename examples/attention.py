"""Time an attention of your own beside a2lib's and PyTorch's, and check that it is right.

    python examples/attention.py

Change `my_attention`. For rows that are stored, and more peers, use notebooks/flash.ipynb.
"""

import torch
import torch.nn.functional as F

from a2lib.attention import FlashAttentionPyTorch, attention_reference, flash_attention
from a2lib.lab import time_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (1, 16, 4096, 64) if DEVICE == "cuda" else (1, 2, 256, 64)  # B, H, N, d
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


def my_attention(q, k, v, is_causal):
    """Attend with a softmax written out: the part to change."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def sdpa(q, k, v, is_causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def a2lib_attention(q, k, v, is_causal):
    """Run a2lib's kernels on a GPU, and the same algorithm in plain PyTorch on a CPU."""
    if DEVICE == "cuda":
        return flash_attention(q, k, v, is_causal=is_causal)
    return FlashAttentionPyTorch.apply(q, k, v, is_causal)


MAKE = {"mine": my_attention, "a2lib": a2lib_attention, "PyTorch": sdpa}

torch.manual_seed(0)
q, k, v, do = (torch.randn(SHAPE, device=DEVICE, dtype=DTYPE) for _ in range(4))
inputs = [x.requires_grad_() for x in (q, k, v)]
exact = [x.detach().double().requires_grad_() for x in inputs]
truth = attention_reference(*exact, is_causal=True)
true_gradients = torch.autograd.grad(truth, exact, do.double())

for name, attention in MAKE.items():
    o = attention(*inputs, is_causal=True)
    gradients = torch.autograd.grad(o, inputs, do)
    wanted = [truth, *true_gradients]
    for tensor, result, right in zip(("o", "dq", "dk", "dv"), [o, *gradients], wanted, strict=True):
        error = ((result.double() - right).norm() / right.norm()).item()
        if not error < TOLERANCE[DTYPE]:
            raise SystemExit(f"{name}: {tensor} is wrong by {error:.2g} of its norm")

    def step(attention=attention):
        torch.autograd.grad(attention(*inputs, is_causal=True), inputs, do)

    timing = time_call(step, device=DEVICE)
    print(f"{name:8} {timing.ms:8.3f} ms forward and backward (median of {timing.n})", flush=True)
