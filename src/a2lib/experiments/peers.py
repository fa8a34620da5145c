"""The attention implementations that are compared, each forced to be itself.

    forward = build("sdpa_cudnn", shape)
    o = forward(q, k, v)                       # (B, H, N, d)

PyTorch picks another backend without a word where the wanted one cannot run; here each call admits
one backend, so that it runs or raises. ``classify`` says what a raised exception means for a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from a2lib.experiments.shapes import Shape

# What runs on a CUDA device alone, in words for the note of an `unsupported` row.
_CUDA_ONLY = {
    "a2lib": "its Triton kernels need a CUDA GPU",
    "sdpa_cudnn": "cuDNN needs a CUDA GPU",
    "sdpa_efficient": "the memory-efficient backend needs a CUDA GPU",
    "flex": "FlexAttention's backward needs a CUDA GPU",
}
# Those that Dynamo and Inductor compile once per shape.
COMPILED = ("compile", "flex")
NOTE_LENGTH = 200
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA(\]| error): out of memory|can't allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)
# Triton reports the errors of the driver in words of its own.
_LOST = re.compile(
    r"CUDA error|illegal memory access|misaligned address|unspecified launch failure"
    r"|illegal instruction|device-side assert"
)


class LostContext(RuntimeError):
    """A CUDA error after which this process can do nothing more on the device."""


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
    torch.backends.cuda.matmul.allow_tf32 = False


def inputs(shape: Shape, device: str, seed: int) -> tuple:
    """q, k, v (leaves that require grad) and do, ``(batch, heads, seq_len, head_dim)``, normal."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    sizes = (shape.batch, shape.heads, shape.seq_len, shape.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [
        torch.randn(sizes, generator=generator, device=device, dtype=dtype) for _ in range(4)
    ]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return tuple(tensors)


def unsupported(implementation: str, device: str) -> str | None:
    """Why ``implementation`` cannot run on ``device`` ("cuda" or "cpu") at all, or None."""
    return None if device == "cuda" else _CUDA_ONLY.get(implementation)


def build(implementation: str, shape: Shape, device: str = "cuda") -> Callable:
    """``forward(q, k, v) -> o`` of one implementation, for one shape.

    ``compile`` and ``flex`` compile on their first call; reset Dynamo between shapes.
    """
    causal = shape.causal
    if implementation == "a2lib":
        from a2lib.attention import flash_attention

        return lambda q, k, v: flash_attention(q, k, v, is_causal=causal)
    if implementation == "tiled":
        from a2lib.attention import FlashAttentionPyTorch

        return lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, causal)
    if implementation in ("eager", "compile"):
        return _reference(causal, compiled=implementation == "compile")
    if implementation == "flex":
        return _flex(shape, device)
    return _sdpa(implementation, causal)


def _reference(causal: bool, *, compiled: bool) -> Callable:
    from a2lib.attention import attention_reference

    def forward(q, k, v):
        return attention_reference(q, k, v, is_causal=causal)

    if not compiled:
        return forward
    import torch

    return torch.compile(forward, dynamic=False, fullgraph=True)


def _sdpa(implementation: str, causal: bool) -> Callable:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "sdpa_flash": SDPBackend.FLASH_ATTENTION,
        "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[implementation]

    def forward(q, k, v):
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return forward


def _flex(shape: Shape, device: str) -> Callable:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def see_no_later_key(b, h, q_index, k_index):
        return q_index >= k_index

    block_mask = None
    if shape.causal:
        block_mask = create_block_mask(
            see_no_later_key, None, None, shape.seq_len, shape.seq_len, device=device
        )
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def classify(error: BaseException, warned: Iterable[str] = ()) -> tuple[str, str]:
    """The status and the one-line note of a row whose call raised ``error``.

    ``warned`` are the warnings of that call: PyTorch gives its reasons for refusing a backend
    there.
    """
    import torch

    from a2lib.attention import UnsupportedError

    chain = _chain(error)
    text = " ".join(str(link) for link in chain)
    first = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    kinds = {type(link).__name__ for link in chain}
    if _OUT_OF_MEMORY.search(text) or any(
        isinstance(link, torch.OutOfMemoryError | MemoryError) for link in chain
    ):
        return "oom", note("out of memory")
    for link in chain:
        if isinstance(link, UnsupportedError | NotImplementedError):
            return "unsupported", note(str(link))
    if "No available kernel" in text or "No viable backend" in text:
        reasons = "; ".join(_reasons(warned))
        return "unsupported", note(reasons or "this backend has no kernel for these inputs")
    if kinds & {"OutOfResources", "NoValidChoicesError"} or "out of resource" in text:
        return "unsupported", note(f"no tile of this kernel fits the GPU: {first}")
    return "error", note(first)


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` leaves the CUDA context unusable: every later call would fail as well."""
    text = " ".join(str(link) for link in _chain(error))
    return classify(error)[0] == "error" and bool(_LOST.search(text))


def note(text: str) -> str:
    """``text`` on one line of bounded length, without the folders of this machine."""
    text = re.sub(r"(?<![\w.:])/(?:[\w.+-]+/)+", "", " ".join(text.split()))
    return text if len(text) <= NOTE_LENGTH else text[: NOTE_LENGTH - 3] + "..."


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _reasons(warned: Iterable[str]) -> list[str]:
    reasons = []
    for text in warned:
        text = re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.S).strip()
        # The other backends are disabled here on purpose, and the headings say nothing.
        if text and "runtime disabled" not in text and not text.endswith("not used because:"):
            reasons.append(text)
    return list(dict.fromkeys(reasons))
