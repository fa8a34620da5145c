"""The attention implementations that are compared, each forced to be itself.

    forward = build("sdpa_cudnn", shape)
    o = forward(q, k, v)                       # (B, H, N, d)

PyTorch picks another backend without a word where the wanted one cannot run; here one alone is
admitted, so that it runs or raises; ``lab.failures`` makes a row of what is raised.

``needed_bytes`` and ``host_bytes`` are how much memory they take: roughly on a GPU, and at most on
a CPU, where trying would end the process.
"""

from collections.abc import Callable

from a2lib.experiments import passes
from a2lib.experiments.flash import sanity
from a2lib.experiments.flash.shapes import ASKED, Shape

# What runs on a CUDA device alone, in words for the note of an `unsupported` row.
_CUDA_ONLY = {
    "a2lib": "its Triton kernels need a CUDA GPU",
    "compiled_backward": "its forward is our Triton kernel, which needs a CUDA GPU",
    "sdpa_cudnn": "cuDNN needs a CUDA GPU",
    "sdpa_efficient": "the memory-efficient backend needs a CUDA GPU",
    "flex": "FlexAttention's backward needs a CUDA GPU",
}
# Those that Dynamo and Inductor compile once per shape.
COMPILED = ("compile", "flex", "compiled_backward")
_LIBRARIES = 2**26  # what PyTorch's own libraries set up for a product of another size
_ROW_TENSORS = 8


def configure() -> None:
    """Set the process-wide switches that every measuring and compiling process has to share.

    They enter the keys of the compilation caches, so a process that compiles ahead with others
    would warm nothing.
    """
    import torch
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    # Donated buffers are gone after one backward; timing it alone takes many on one graph.
    torch._functorch.config.donated_buffer = False
    torch._functorch.config.enable_autograd_cache = True
    torch._inductor.config.fx_graph_cache = True
    # Beyond its recompile limit Dynamo runs the eager code instead, which would be timed as
    # compiled.
    torch._dynamo.config.error_on_recompile = True
    torch.set_float32_matmul_precision("highest")


def inputs(shape: Shape, device: str, seed: int) -> tuple:
    """q, k, v (leaves that require grad) and do, of ``shape.sizes``, normal."""
    import torch

    how = passes.random(shape.dtype, device, seed)
    *qkv, do = (torch.randn(shape.sizes, **how) for _ in range(4))
    return (*(x.requires_grad_() for x in qkv), do)


def check(implementation: str, device: str) -> None:
    """Raise NotImplementedError with the reason, where ``implementation`` cannot run on ``device``
    ("cuda" or "cpu") at all."""
    if device == "cpu" and implementation in _CUDA_ONLY:
        raise NotImplementedError(_CUDA_ONLY[implementation])


def build(implementation: str, shape: Shape, device: str = "cuda") -> Callable:
    """``forward(q, k, v) -> o`` of one implementation, for one shape.

    Those of ``COMPILED`` compile on their first call; reset Dynamo between shapes.
    """
    causal = shape.causal
    if implementation == "a2lib":
        from a2lib.attention import flash_attention

        return lambda q, k, v: flash_attention(q, k, v, is_causal=causal)
    if implementation == "tiled":
        from a2lib.attention import FlashAttentionPyTorch

        return lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, causal)
    if implementation == "compiled_backward":
        from a2lib.experiments.flash.recomputed import CompiledBackward

        return lambda q, k, v: CompiledBackward.apply(q, k, v, causal)
    if implementation in ("eager", "compile"):
        return reference(causal, compiled=implementation == "compile")
    if implementation == "flex":
        return _flex(shape, device)
    return _sdpa(implementation, causal)


def reference(causal: bool, *, compiled: bool) -> Callable:
    """The definition, compiled at its first call if it is to be."""
    import torch

    from a2lib.attention import attention_reference

    def forward(q, k, v):
        return attention_reference(q, k, v, is_causal=causal)

    return torch.compile(forward, dynamic=False, fullgraph=True) if compiled else forward


def _sdpa(implementation: str, causal: bool) -> Callable:
    import torch.nn.functional as F
    from torch.compiler import is_compiling
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, f"{implementation.removeprefix('sdpa_').upper()}_ATTENTION")

    def forward(q, k, v):
        if is_compiling():  # decided while traced: no part of a call
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        _admit(backend)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return forward


# The one backend that SDPA may use in this process, and the context that says so.
_admitted: dict = {}


def _admit(backend) -> None:
    """Have SDPA use this backend or raise, until another is admitted. A context around each call
    would be timed with it, and takes the host longer than the call."""
    if backend not in _admitted:
        from torch.nn.attention import sdpa_kernel

        while _admitted:
            _admitted.popitem()[1].__exit__(None, None, None)
        _admitted[backend] = sdpa_kernel([backend])
        _admitted[backend].__enter__()


def _flex(shape: Shape, device: str) -> Callable:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def see_no_later_key(b, h, q_index, k_index):
        return q_index >= k_index

    sizes = None, None, shape.seq_len, shape.seq_len
    block_mask = create_block_mask(see_no_later_key, *sizes, device) if shape.causal else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def needed_bytes(implementation: str, shape: Shape, pass_: str) -> int:
    """An estimate of the memory one pass needs beside its inputs: for planning, never reported.

    Eager attention keeps the scores, their scaled and masked copies and the weights for its
    backward, which adds the gradients of two of them.
    """
    linear = (2 if pass_ == "forward" else 6) * shape.tensor_bytes
    recomputed = implementation == ASKED and pass_ != "forward"
    if implementation not in ("eager", "compile") and not recomputed:
        return linear
    return linear + (4 if pass_ == "forward" else 6) * shape.matrix_bytes


def host_bytes(implementation: str, shape: Shape, pass_: str) -> int:
    """An upper bound of what measuring one pass on the CPU takes, all told: the inputs, the float64
    check and the pass itself. Within about a factor of two where that is much."""
    rows = shape.batch * shape.heads * shape.seq_len
    # In float64: k, v, dk, dv and what these are compared with; scores of the checked rows.
    check = 8 * rows * (8 * shape.head_dim + _ROW_TENSORS * sanity.ROWS)
    if implementation in ("eager", "compile"):
        own = shape.eager.total("forward" if pass_ == "forward" else "backward")
    else:
        own = 4 * shape.tensor_bytes + needed_bytes(implementation, shape, pass_)
    return _LIBRARIES + check + own
