"""The dtypes of the toy model under autocast: by PyTorch's lists, as observed, as published."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.mixed_precision.rows import MISSING, Mixed, named
from a2lib.report.data import PUBLISHED
from a2lib.report.metrics import pick
from a2lib.report.style import STATUS, device_name, listed
from a2lib.report.tables import Markdown, Table

LOW = "low"  # the dtype that autocast was asked for
# tensor -> (its dtype on CUDA by PyTorch's lists, why). The six of the question come first.
RULES = {
    "fc1.weight": ("fp32", "autocast casts a copy where an operation wants one"),
    "fc1 output": (LOW, "`linear` is on the list of what runs low"),
    "ln output": ("fp32", "`layer_norm` is on CUDA's fp32 list"),
    "logits": (LOW, "`linear` casts its fp32 input down again"),
    "loss: cross-entropy": ("fp32", "its `log_softmax` and `nll_loss` are on the fp32 list"),
    "gradient of fc1.weight": ("fp32", "the cast's backward casts back to the weight's dtype"),
    "relu output": (LOW, "`relu` is on no list: it follows its input"),
    "loss: mean of the logits": (LOW, "`mean` is on no list: it follows its input"),
    "gradient of the logits": (LOW, "a gradient has the dtype of its tensor"),
    "gradient of the ln output": ("fp32", "a gradient has the dtype of its tensor"),
    "gradient of the fc1 output": (LOW, "a gradient has the dtype of its tensor"),
    "gradient of ln.weight": ("fp32", "a gradient has the dtype of its tensor"),
    "gradient of fc2.weight": ("fp32", "as that of `fc1.weight`"),
}
ASKED = tuple(RULES)[:6]
LOWS = ("fp16", "bf16")


def expected(tensor: str, low: str) -> str:
    """The dtype that PyTorch's lists for CUDA give ``tensor``."""
    dtype = RULES[tensor][0]
    return low if dtype == LOW else dtype


def observed(mixed: Mixed, device: str, low: str) -> dict[str, str]:
    """Tensor -> the dtype it had on ``device``, or why there is none."""
    rows = pick(mixed.of("autocast_dtypes", device), autocast=low)
    return {
        r.quantity: r.observed if r.status == "ok" else STATUS[r.status] for r in rows.itertuples()
    }


def table(mixed: Mixed, low: str, caption: str, label: str) -> Table:
    """Every tensor: what the lists say for CUDA, why, and what each device showed."""
    devices = mixed.devices_of("autocast_dtypes")
    seen = {device: observed(mixed, device, low) for device in devices}
    lines = []
    for tensor, (_, why) in RULES.items():
        cells = [seen[device].get(tensor, MISSING) for device in devices] or [MISSING]
        lines.append([tensor, expected(tensor, low), *cells, why])
    heads = [device_name(device) for device in devices] or ["observed"]
    columns = ["tensor", "by the lists", *heads, "why"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=len(columns))


def sentence(mixed: Mixed) -> Markdown:
    """The six dtypes under fp16: observed on the published GPU, or by the lists until then."""
    seen = observed(mixed, PUBLISHED, "fp16")
    if all(tensor in seen for tensor in ASKED):
        how = f"Observed on {named(PUBLISHED)}"
    else:
        seen = {tensor: expected(tensor, "fp16") for tensor in ASKED}
        how = f"By PyTorch's lists for CUDA (on {named(PUBLISHED)} {MISSING})"
    return Markdown(
        f"{how}, under autocast to fp16: parameters {seen['fc1.weight']}, output of `fc1` "
        f"{seen['fc1 output']}, output of `ln` {seen['ln output']}, logits {seen['logits']}, loss "
        f"{seen['loss: cross-entropy']}, gradients of the parameters "
        f"{seen['gradient of fc1.weight']}."
    )


def differences(mixed: Mixed) -> Markdown:
    """Where a device departs from the lists for CUDA."""
    text = []
    for device in mixed.devices_of("autocast_dtypes"):
        seen = {low: observed(mixed, device, low) for low in LOWS}
        pairs = [(tensor, low) for tensor in RULES for low in LOWS if tensor in seen[low]]
        odd = dict.fromkeys(t for t, low in pairs if seen[low][t] != expected(t, low))
        if not odd:
            text.append(f"On {named(device)} all {len(pairs)} dtypes are those of the lists.")
        else:
            text.append(f"On {named(device)} the lists for CUDA do not hold for "
                        f"{listed(list(odd))}{_cpu(device)}.")  # fmt: skip
    return Markdown(" ".join(text) or "No device has been observed yet.")


def published(mixed: Mixed, caption: str, label: str) -> Table:
    """The six answers of each public writeup; what the lists or the rows contradict is bold."""
    rows = pick(mixed.reference, table="dtypes")
    seen = observed(mixed, PUBLISHED, "fp16")
    sources = list(dict.fromkeys(rows["device"]))
    lines = []
    for tensor in ASKED:
        right = seen.get(tensor, expected(tensor, "fp16"))
        answers = [pick(rows, item=tensor, device=d)["answer"].iloc[0] for d in sources]
        lines.append([tensor, right, *(a if a == right else f"**{a}**" for a in answers)])
    return Table(pd.DataFrame(lines, columns=["tensor", "here", *sources]), caption, label)


def wrong(mixed: Mixed) -> Markdown:
    """Which published answers are wrong, in words."""
    rows = pick(mixed.reference, table="dtypes")
    seen = observed(mixed, PUBLISHED, "fp16")
    text = [
        f"the writeup on {r.device} has {r.answer} for the {_plain(r.item)}, where "
        f"{'we observe' if r.item in seen else 'the lists have'} {_right(seen, r.item)}"
        for r in rows.itertuples() if r.answer != _right(seen, r.item)
    ]  # fmt: skip
    if not text:
        return Markdown("All published answers agree.")
    return Markdown(f"Of the published answers {len(text)} differ: {listed(text)}.")


def _right(seen: dict[str, str], tensor: str) -> str:
    return seen.get(tensor, expected(tensor, "fp16"))


def _plain(tensor: str) -> str:
    return "loss" if tensor == "loss: cross-entropy" else tensor


def _cpu(device: str) -> str:
    return ", since autocast has other lists for the CPU" if device == "cpu" else ""
