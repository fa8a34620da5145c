"""Eager attention with the casts of CUDA's autocast, on a CPU."""

import torch


def as_cuda_casts(q, k, v):
    """Causal attention with the softmax in float32, as CUDA's autocast has it and the CPU's not."""
    scores = q @ k.transpose(-1, -2) * (1 / q.shape[-1] ** 0.5)
    token = torch.arange(q.shape[-2])
    scores = scores.masked_fill(torch.arange(q.shape[-2]) > token[:, None], float("-inf"))
    return torch.softmax(scores.float(), -1) @ v
