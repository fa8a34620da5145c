"""Normal inputs of attention."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def inputs(dtype, *sizes, seed=0, device="cpu"):
    """q, k, v, which require gradients, and do."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "dtype": DTYPES[dtype], "device": device}
    q, k, v, do = torch.randn(4, *sizes, **options)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do
