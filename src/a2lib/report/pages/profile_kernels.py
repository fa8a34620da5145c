"""List the kernels of a trace by name and by class, with what each of them does."""

import re

import pandas as pd

from a2lib.report.tables import cells
from a2lib.report.units import percent

LEAST_SHARE = 0.01  # of a step: smaller kernels are not listed
# What a kernel does, by the first pattern that its name has.
WORK = {
    r"splitK|split_k": "adds the parts of a split matmul",
    r"nvjet_sm90": "matmul on tensor cores (cuBLAS)",
    r"^sm80_xmma_gemm_f32f32": "fp32 matmul, no tensor cores (cuBLAS)",
    r"cutlass_80_simt_sgemm": "fp32 matmul, no tensor cores (CUTLASS)",
    r"gemm|gemv": "matmul",
    r"^forward_kernel": "a2lib's FlashAttention (Triton), forward",
    r"^backward_dq": "a2lib's FlashAttention (Triton), gradient of Q",
    r"^backward_dkdv": "a2lib's FlashAttention (Triton), gradients of K and V",
    r"^backward_kernel": "a2lib's FlashAttention for Hopper, gradients of Q, K and V",
    r"^prepare_kernel|^finish_kernel": (
        "a2lib's FlashAttention for Hopper: sums of rows before, scaling of dQ after"
    ),
    r"^adamw$": "a2lib's AdamW (Triton), one launch per parameter",
    r"triton_\w+softmax_backward": "Inductor: the softmax's backward with mask and scale",
    r"triton_\w+softmax": "Inductor: scale, mask and softmax in one",
    r"triton_\w+silu_backward": "Inductor: backward of the FFN's gate",
    r"triton_\w+silu": "Inductor: the FFN's gate",
    r"triton_\w+flip": "Inductor: RoPE (or its backward) with copies",
    r"triton_(per|red)": "Inductor: a norm, or a sum, with what is around it",
    r"triton_poi_fused__to_copy(_cat)?_\d+$": "Inductor: casts of weights or inputs",
    r"triton_poi_fused_cat_\d+$": "Inductor: the weights of Q, K and V joined",
    r"triton_": "Inductor: elementwise operations in one",
    r"softmax_warp_forward": "the softmax, one warp per row",
    r"softmax_warp_backward": "the softmax's backward",
    r"multi_tensor_apply": "fused AdamW, many tensors per launch",
    r"masked_fill": "writes minus infinity where the mask is",
    r"bfloat16_copy": "cast to bf16",
    r"direct_copy": "copy or cast, often of a transposed tensor",
    r"mask": "masked fill",
    r"Memcpy": "copy within the GPU",
    r"Memset": "clears a workspace or a gradient",
    r"CUDAFunctor_add": "addition: residuals, sums of gradients",
    r"silu_backward": "backward of SiLU",
    r"silu": "SiLU",
    r"pow_tensor|rsqrt|MeanOps": "part of a norm",
    r"nll_loss|[lL]og_?[sS]oft": "the loss",
    r"embedding|indexSelect|Radix|radix": "embedding, or its backward",
    r"reduce_kernel": "sum over a dimension",
    r"MulFunctor|binary": "multiplication by a tensor or a number",
    r"elementwise": "another elementwise operation",
}


def work_of(kernel: str) -> str:
    """Return what a kernel of this name does, or an empty text."""
    for pattern, words in WORK.items():
        if re.search(pattern, kernel):
            return words
    return ""


def by_name(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return a trace's kernel time by phase, class and kernel name, the largest first, as texts."""
    sums = kernels.groupby(["phase", "kind", "kernel"])[["calls", "ms"]].sum().reset_index()
    shares = sums["ms"] / sums["ms"].sum()
    listed = (shares >= LEAST_SHARE) & (sums["kernel"] != "rest")
    sums = sums[listed].sort_values("ms", ascending=False)
    return pd.DataFrame(
        {
            "phase": sums["phase"],
            "class": sums["kind"],
            "what it does": sums["kernel"].map(work_of),
            "calls": sums["calls"],
            "ms": cells(sums["ms"]),
            "share": [percent(share, 1) for share in shares[sums.index]],
            "each, µs": cells(1e3 * sums["ms"] / sums["calls"]),
            "name": [f"`{name}`" for name in sums["kernel"]],
        }
    )
