"""How much device memory a call needs, and what a library takes for itself."""

from __future__ import annotations

import gc
from collections.abc import Callable


def peak_bytes(fn: Callable[[], object], *, device: str = "cuda") -> int | None:
    """Peak CUDA memory of ``fn()`` above what was allocated when it was entered, in bytes.

    Counts what tensors occupy, not what the caching allocator keeps in reserve. None, without
    calling ``fn``, for ``device="cpu"`` or where there is no CUDA device. An exception of ``fn``
    passes through.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    # Garbage that is collected in mid-call would be taken off the peak.
    gc.collect()
    torch.cuda.synchronize()
    at_entry = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - at_entry


def take_workspaces(device: str) -> None:
    """Let cuBLAS take what it keeps, for this thread and for autograd's, so that what is allocated
    from now on is tensors; nothing on "cpu"."""
    if device == "cuda":
        import torch

        x = torch.ones(1, 64, 64, device=device, requires_grad=True)
        (x @ x).sum().backward()
