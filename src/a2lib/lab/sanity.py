"""Is an implementation's answer right? Checked cheaply at each shape before anything is timed.

A few query rows decide: their outputs need ``rows * N`` scores, not ``N * N``. With a do that is
zero outside those rows, all of dq, dk and dv follow from the same few rows of weights. Everything
here is float64 on the implementation's own inputs, so what is left is its own rounding.
"""

import math

from a2lib.attention.shapes import check_inputs

ROWS = 8
# Largest error of a row, relative to the root of the sum of squares of the terms it adds up: what
# rounding explains. Eager bf16 rounds scores and weights too; fp32 has to be fp32, not TF32.
TOLERANCE = {"bf16": 6e-2, "fp16": 1e-2, "fp32": 1e-4}
# Rows whose terms are smaller than this may lose them to 0: fp16 ends early.
TINY = {"bf16": 1e-6, "fp16": 1e-4, "fp32": 1e-6}


class WrongResult(RuntimeError):
    """An implementation's output or gradient differs from attention by more than rounding."""


class Expected:
    """The right o on a few rows, and the right dq, dk, dv for a do that is zero on the others.

    q, do: ``(..., N, d)``; k, v the same, or with fewer heads, each shared by a group of q's.
    ``self.do`` is that do. Costs O(rows * N * d) for each head.
    """

    def __init__(self, q, k, v, do, *, causal: bool, dtype: str) -> None:
        import torch

        group = check_inputs(q, k, v)
        self.tolerance, self.tiny = TOLERANCE[dtype], TINY[dtype]
        with torch.no_grad():
            n = q.shape[-2]
            self.rows = torch.linspace(0, n - 1, min(ROWS, n), dtype=torch.float64)
            self.rows = self.rows.round().long().unique().to(q.device)
            self.do = torch.zeros_like(do)
            self.do[..., self.rows, :] = do[..., self.rows, :]
            q, do = q[..., self.rows, :].double(), do[..., self.rows, :].double()
            k, v = k.double(), v.double()
            if group > 1:
                k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
            scale = 1 / math.sqrt(q.shape[-1])
            scores = q @ k.transpose(-1, -2) * scale
            if causal:
                later = torch.arange(n, device=q.device) > self.rows[:, None]
                scores = scores.masked_fill(later, float("-inf"))
            p = torch.softmax(scores, dim=-1)
            dp = do @ v.transpose(-1, -2)
            delta = (p * dp).sum(-1, keepdim=True)
            ds = p * (dp - delta) * scale
            # What ds adds up cancels, within dp and between dp and delta; its rounding does not.
            typical = do.norm(dim=-1)[..., None] * v.norm(dim=-1)[..., None, :] * scale
            terms = p * (dp.abs() + delta.abs() + typical) * scale
            self.right = {
                "o": (p @ v, _size(p, v)),
                "dq": (ds @ k, _size(terms, k)),
                "dk": _over_groups(ds.mT @ q, _size(terms.mT, q), group),
                "dv": _over_groups(p.mT @ do, _size(p.mT, do), group),
            }

    def check(self, forward, qkv) -> None:
        """Raise WrongResult unless the output of ``forward(q, k, v)`` and its gradients are
        right."""
        import torch

        o = forward(*qkv)
        self.check_output(o.detach())
        self.check_gradients(*torch.autograd.grad(o, qkv, self.do))

    def check_output(self, o) -> None:
        """Raise WrongResult unless o ``(..., N, d)`` is finite and right on the chosen rows."""
        self._check("o", o, o[..., self.rows, :])

    def check_gradients(self, dq, dk, dv) -> None:
        """Raise WrongResult unless these are the gradients for ``self.do``, and finite."""
        self._check("dq", dq, dq[..., self.rows, :])
        self._check("dk", dk, dk)
        self._check("dv", dv, dv)

    def _check(self, name: str, whole, checked) -> None:
        check_finite(name, whole)
        expected, size = self.right[name]
        if checked.shape != expected.shape:
            raise WrongResult(f"{name} has shape {tuple(whole.shape)}")
        # A key that no chosen row sees has terms of 0 and must have a gradient of 0.
        error = (checked.double() - expected).norm(dim=-1) / size.clamp_min(self.tiny)
        if not error.max().item() <= self.tolerance:
            raise WrongResult(
                f"wrong {name}: error {error.max().item():.2g} relative to float64, allowed"
                f" {self.tolerance:g}"
            )


def _size(weights, vectors):
    """``sqrt(sum_j weights_ij^2 |vectors_j|^2)``: (..., i, j), (..., j, d) -> (..., i)."""
    return (weights.square() @ vectors.square().sum(-1, keepdim=True)).sqrt().squeeze(-1)


def _over_groups(gradient, size, group: int):
    """Add up the gradients of a group's heads, and the squares of the sizes of their terms."""
    if group == 1:
        return gradient, size
    gradient = gradient.unflatten(-3, (-1, group)).sum(-3)
    return gradient, size.square().unflatten(-2, (-1, group)).sum(-2).sqrt()


def check_finite(name: str, tensor) -> None:
    """Raise WrongResult where ``tensor`` holds an infinity or a NaN."""
    if not tensor.isfinite().all().item():
        raise WrongResult(f"{name} is not finite")
