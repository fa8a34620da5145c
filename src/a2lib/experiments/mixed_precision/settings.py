"""What is looked at: the tensors of the toy model and the parts of a layer norm."""

from __future__ import annotations

AUTOCAST = ("none", "fp16", "bf16")
DTYPES = ("fp32", "fp16", "bf16")
# In the order in which a training step makes them.
TENSORS = (
    "fc1.weight",
    "fc1 output",
    "relu output",
    "ln output",
    "logits",
    "loss: cross-entropy",
    "loss: mean of the logits",
    "gradient of the logits",
    "gradient of the ln output",
    "gradient of the fc1 output",
    "gradient of fc1.weight",
    "gradient of ln.weight",
    "gradient of fc2.weight",
)
MEANS = (0, 1, 10, 100, 300)
SCALES = ("0.0001", "0.01", "1", "100", "300")
EPSILONS = ("1e-05", "1e-06", "1e-08", "1e-12")
# quantity -> the inputs it is computed for; what each is, is in ``handlers``.
VARIANCES = (
    "variance of the stored input",
    "variance, one pass",
    "variance, two passes",
    "variance, one pass in fp32",
    "variance, two passes in fp32",
)
ERRORS = ("layer_norm's largest error", "largest error, by hand")
QUANTITIES = {
    **{name: tuple(f"mean {m}" for m in MEANS) for name in VARIANCES},
    "mean, added one by one": ("mean 1",),
    "mean of squares": tuple(f"scale {s}" for s in SCALES),
    "eps": EPSILONS,
    "constant input, normalised": EPSILONS,
    **{name: tuple(f"mean {m}" for m in MEANS) for name in ERRORS},
}


def layernorm_keys(features: int) -> list[dict[str, object]]:
    """The keys of the layer-norm table, in the order of QUANTITIES."""
    return [
        {"quantity": quantity, "setting": setting, "dtype": dtype, "features": features}
        for quantity, settings in QUANTITIES.items()
        for setting in settings
        for dtype in DTYPES
        if not (dtype == "fp32" and quantity.endswith("in fp32"))
    ]
