"""SwiGLU whose nine matrix products, of forward and backward, have FP8 operands.

    use_fp8(model)      # parameters and their names stay

Each product is ``a @ b.T``. Each row of either operand is scaled so that its largest number is the
largest of e4m3, 448, by a scale of the moment; sums are in float32, and the result is in the dtype
of x. So a weight is rounded twice, along its rows for the forward and along its columns for the
gradient of x, and so are x, the hidden tensor and the gradients.

On a GPU the products are cuBLAS's, of GPUs that have FP8 (H100 and later, Ada). Elsewhere
``fp8_product`` multiplies the same rounded numbers in float32: slow, for tests and trials.

The saved tensors are those of a SwiGLU in 16 bits, so plans of what a block keeps hold here too.

Source: FP8 formats, Micikevicius et al., 2022.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from a2lib.model.layers import SwiGLU

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# cuBLAS's FP8 products take sizes that are multiples of it.
MULTIPLE = 16


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x ``(M, K)`` in e4m3, contiguous, and the float32 scales ``(M, 1)`` that give x again.

    A row with NaN or infinity becomes NaN.
    """
    largest = x.abs().amax(1, keepdim=True).float()
    scale = LARGEST / largest.clamp(min=1e-12)  # a row of zeros stays one
    # A product in float32 may end a little above the largest number, and the cast has no limits.
    scaled = (x.float() * scale).clamp(-LARGEST, LARGEST)
    return scaled.to(E4M3).contiguous(), scale.reciprocal()


def fp8_product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Return ``a @ b.T`` in ``dtype`` of two results of ``fp8_rows``, ``(M, K)`` and ``(N, K)``.

    ``fast`` lets Hopper's tensor cores add up in fewer bits, without a sum in float32 in between.
    """
    (a8, a_scale), (b8, b_scale) = a, b
    if not a8.is_cuda:
        return ((a8.float() * a_scale) @ (b8.float() * b_scale).t()).to(dtype)
    # Private: of the public torch.nn.functional.scaled_mm no time was measured.
    return torch._scaled_mm(
        a8,
        b8.t(),
        scale_a=a_scale,
        scale_b=b_scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Fp8SwiGLU(torch.autograd.Function):
    """Compute ``(silu(x w1') * x w3') w2'`` of x ``(N, D)``, and its gradients.

    w1 and w3 are not joined: products of twice the width are no faster at 4096 x 11,008, and a
    joint result could only be kept or sent to the host as a whole. Sums are fast in the forward
    alone: a gradient's error would stay in the weights.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        x8 = fp8_rows(x)
        gate = fp8_product(x8, fp8_rows(w1), x.dtype, fast=True)
        value = fp8_product(x8, fp8_rows(w3), x.dtype, fast=True)
        ctx.save_for_backward(x, gate, value, w1, w2, w3)
        hidden = F.silu(gate) * value
        return fp8_product(fp8_rows(hidden), fp8_rows(w2), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        x, gate, value, w1, w2, w3 = ctx.saved_tensors
        dtype = x.dtype
        d_hidden = fp8_product(fp8_rows(dy), fp8_rows(w2.t()), dtype).float()
        g, v = gate.float(), value.float()
        sigmoid = torch.sigmoid(g)
        silu = g * sigmoid
        hidden = (silu * v).to(dtype)
        d_gate = (d_hidden * v * sigmoid * (1 + g * (1 - sigmoid))).to(dtype)
        d_value = (d_hidden * silu).to(dtype)
        dx = fp8_product(fp8_rows(d_gate), fp8_rows(w1.t()), dtype)
        dx = dx + fp8_product(fp8_rows(d_value), fp8_rows(w3.t()), dtype)
        columns = fp8_rows(x.t())
        dw1 = fp8_product(fp8_rows(d_gate.t()), columns, dtype)
        dw2 = fp8_product(fp8_rows(dy.t()), fp8_rows(hidden.t()), dtype)
        dw3 = fp8_product(fp8_rows(d_value.t()), columns, dtype)
        return dx, dw1, dw2, dw3


def fp8_swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return ``(silu(x @ w1.T) * (x @ w3.T)) @ w2.T`` by FP8 products.

    Arguments:

    - ``x``: ``(..., D)``, bfloat16; without a GPU float32 too. The tokens of all dimensions but the
      last are a multiple of 16, since the weights' gradients are sums over them.
    - ``w1``, ``w3``: ``(F, D)``, ``w2``: ``(D, F)``, in the dtype of x, D and F multiples of 16.

    Raises ValueError for other shapes and dtypes.
    """
    _check(x, w1, w2, w3)
    return _Fp8SwiGLU.apply(x.flatten(0, -2), w1, w2, w3).view(x.shape)


def _check(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> None:
    wide, narrow = w1.shape
    if x.dim() < 2 or x.shape[-1] != narrow or w3.shape != w1.shape or w2.shape != (narrow, wide):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, w1, w2, w3))
        raise ValueError(
            f"x, w1, w2, w3 are {shapes}; allowed are (..., D), (F, D), (D, F), (F, D)"
        )
    tokens = x.numel() // narrow
    for name, size in {"tokens": tokens, "d_model": narrow, "d_ff": wide}.items():
        if size % MULTIPLE:
            raise ValueError(f"{name} is {size}; FP8 products take multiples of {MULTIPLE}")
    allowed = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    for name, tensor in {"x": x, "w1": w1, "w2": w2, "w3": w3}.items():
        if tensor.dtype not in allowed or tensor.dtype != x.dtype:
            names = " or ".join(map(str, allowed))
            raise ValueError(f"{name} is {tensor.dtype}; allowed are {names}, the same for all")


class Fp8SwiGLU(nn.Module):
    """Compute what the SwiGLU ``ffn`` does, with its layers, by FP8 products."""

    def __init__(self, ffn: SwiGLU) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = ffn.w1, ffn.w2, ffn.w3

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., d_model)`` of x ``(..., d_model)``. Raises as ``fp8_swiglu``."""
        return fp8_swiglu(x, self.w1.weight, self.w2.weight, self.w3.weight)


def use_fp8(model: nn.Module) -> None:
    """Have every SwiGLU in ``model`` multiply in FP8; its parameters stay, by their names."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is SwiGLU:
                setattr(module, name, Fp8SwiGLU(child))
