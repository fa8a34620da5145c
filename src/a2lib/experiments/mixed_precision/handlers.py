"""What a worker does for the sections of mixed precision: it runs the operations and looks.

Random inputs are made on the CPU in float64, so that every device and dtype starts from the same
numbers; what is stored of them in the dtype is rounded once.
"""

from collections.abc import Mapping
from fractions import Fraction

import torch
import torch.nn.functional as F

from a2lib.experiments.harness.worker import Job
from a2lib.experiments.mixed_precision import TENSORS, loop_of
from a2lib.theory.floating import decimal

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}


class ToyModel(torch.nn.Module):
    """The handout's: a linear layer, ReLU, a layer norm and a linear layer; (B, in) -> (B, out)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(in_features, 10, bias=False)
        self.ln = torch.nn.LayerNorm(10)
        self.fc2 = torch.nn.Linear(10, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor on the way, by name."""
        fc1 = self.fc1(x)
        relu = fc1.relu()
        ln = self.ln(relu)
        return {"fc1 output": fc1, "relu output": relu, "ln output": ln, "logits": self.fc2(ln)}


def accumulate(job: Job) -> None:
    """The wanted accumulation loops, each as the handout writes it."""
    for key in job.keys:
        loop = loop_of(key)
        total = torch.tensor(0, dtype=DTYPES[loop.sum], device=job.device)
        addend = torch.tensor(float(loop.step), dtype=DTYPES[loop.addend], device=job.device)
        for _ in range(loop.terms):
            total += addend.type(DTYPES[loop.sum]) if loop.cast else addend
        job.put({**key, "status": "ok", "computed": decimal(Fraction(total.item()))})


def observe(job: Job) -> None:
    """The dtypes of the toy model's tensors under autocast."""
    (low,) = {key["autocast"] for key in job.keys}
    dtypes = observed_dtypes(low, job.device, job.seed)
    for key in job.keys:
        job.put({**key, "status": "ok", "observed": dtypes[key["quantity"]]})


def observed_dtypes(low: str, device: str, seed: int) -> dict[str, str]:
    """Tensor -> dtype in a forward and backward of the toy model, its weights in fp32, under
    autocast to ``low`` ("fp16", "bf16", or "none" for no autocast)."""
    torch.manual_seed(seed)
    model = ToyModel(20, 5).to(device)
    x = torch.randn(8, 20, device=device)
    targets = torch.randint(5, (8,), device=device)
    with torch.autocast(device, DTYPES.get(low, torch.bfloat16), enabled=low != "none"):
        found = {"fc1.weight": model.fc1.weight, **model(x)}
        for name in ("fc1 output", "ln output", "logits"):
            found[name].retain_grad()
        found["loss: cross-entropy"] = F.cross_entropy(found["logits"], targets)
        found["loss: mean of the logits"] = found["logits"].mean()
    found["loss: cross-entropy"].backward()
    for name in ("logits", "ln output", "fc1 output"):
        found[f"gradient of the {name}"] = found[name].grad
    for name, weight in model.named_parameters():
        found[f"gradient of {name}"] = weight.grad
    return {name: NAMES[found[name].dtype] for name in TENSORS}


def normalise(job: Job) -> None:
    """The wanted parts of a layer norm."""
    for key in job.keys:
        computed, truth = part(key, job.device, job.seed)
        shown = {"computed": f"{computed:.9g}", "truth": f"{truth:.9g}"}
        job.put({**key, "status": "ok", **shown})


def part(key: Mapping[str, object], device: str, seed: int) -> tuple[float, float]:
    """One quantity of a layer norm of ``features`` numbers, computed in ``dtype``, and what it
    would be.

    The truth is float64's on the numbers as the dtype stores them, so that the arithmetic alone is
    judged; of "variance of the stored input" and "eps" it is that of the numbers before.
    """
    quantity, setting, dtype = key["quantity"], key["setting"], DTYPES[key["dtype"]]
    if quantity == "eps":
        return torch.tensor(float(setting), dtype=dtype, device=device).item(), float(setting)
    if quantity == "constant input, normalised":
        x = torch.ones(key["features"], dtype=dtype, device=device)
        return _largest(_by_hand(x, float(setting))), 0.0
    exact = torch.randn(
        key["features"], dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    kind, value = setting.split()
    exact = exact * float(value) if kind == "scale" else exact + float(value)
    x = exact.to(dtype).to(device)
    wide = x.double()
    if quantity == "variance of the stored input":
        return _two_passes(wide).item(), _two_passes(exact).item()
    if quantity.startswith("variance"):
        used = x.float() if quantity.endswith("in fp32") else x
        passes = _one_pass if "one pass" in quantity else _two_passes
        return passes(used).item(), _two_passes(wide).item()
    if quantity == "mean, added one by one":
        total = torch.zeros((), dtype=dtype, device=device)
        for number in x:
            total += number
        return (total / len(x)).item(), wide.mean().item()
    if quantity == "mean of squares":
        return (x * x).mean().item(), (wide * wide).mean().item()
    true = F.layer_norm(wide, wide.shape)
    got = _by_hand(x, 1e-5) if quantity.endswith("by hand") else F.layer_norm(x, x.shape)
    return _largest(got.double() - true), 0.0


def _one_pass(x: torch.Tensor) -> torch.Tensor:
    """The variance as the mean of squares less the square of the mean."""
    return (x * x).mean() - x.mean() ** 2


def _two_passes(x: torch.Tensor) -> torch.Tensor:
    """The variance as the mean of the squared distances from the mean."""
    return ((x - x.mean()) ** 2).mean()


def _by_hand(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm with every result rounded to the dtype of ``x``."""
    return (x - x.mean()) * torch.rsqrt(_two_passes(x) + eps)


def _largest(x: torch.Tensor) -> float:
    # max() passes a NaN on.
    return x.abs().max().item()
