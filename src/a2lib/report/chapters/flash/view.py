"""What the chapter compares, along what, and how that is called and drawn."""

from __future__ import annotations

from a2lib.report import style
from a2lib.report.metrics import OURS
from a2lib.report.style import Look, Looks
from a2lib.report.view import Column, Columns, View

LOOKS = Looks({
    OURS: Look("a2lib (ours)", "#d55e00", "o", ours=True, short="ours"),
    "eager": Look("PyTorch eager", "#444444", "s", short="eager"),
    "compile": Look("torch.compile", "#a86f00", "D", short="compile"),
    "sdpa_flash": Look("SDPA FlashAttention-2", "#0072b2", "^", short="SDPA FA2"),
    "sdpa_cudnn": Look("SDPA cuDNN", "#00825f", "v", short="cuDNN"),
    "sdpa_efficient": Look("SDPA memory-efficient", "#2a86bf", "P", short="SDPA eff."),
    "flex": Look("FlexAttention", "#b0558a", "X", short="Flex"),
    "tiled": Look("tiled PyTorch", "#8b5a2b", "p", short="tiled"),
})  # fmt: skip
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
EVERY_DTYPE = ("bf16", "fp32", "fp16")
SHAPE = ["dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"]
COLUMNS = Columns({
    "dtype": Column("dtype", order=EVERY_DTYPE),
    "seq_len": Column("tokens", text=style.tokens, axis="sequence length (tokens)"),
    "head_dim": Column("d", title="d = {}".format),
    "causal": Column("mask", text=lambda causal: "causal" if causal else "full"),
    "pass": Column("pass", text=lambda name: PASSES.get(name, name), order=tuple(PASSES)),
    "device": Column("device", text=style.device_name),
})  # fmt: skip
VIEW = View(tuple(SHAPE), "implementation", "seq_len", LOOKS, COLUMNS)
