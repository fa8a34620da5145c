"""Name what a block may save for its backward: strategies of activation checkpointing, and plans.

``a2lib.model`` carries them out, ``a2lib.theory.memory`` counts them.
"""

from dataclasses import dataclass

# What a strategy takes after a colon: a number of blocks, or the operations whose results it saves.
STRATEGIES = {
    "none": "",
    "half": "",
    "block": "",
    "segments": "k",
    "nested": "k",
    "recursive": "",
    "chain": "",
    "selective": "ops",
}
# The operations whose results are saved: linear layers, every matmul, or attention if it is one
# operation (eager attention is several).
OPS = ("linear", "products", "attention")
ATTENTION_PRODUCTS, FFN_PRODUCTS = ("q_proj", "k_proj", "v_proj"), ("w1", "w3")
PRODUCTS = ATTENTION_PRODUCTS + FFN_PRODUCTS
# Tokens of a loss chunk; their logits of a vocabulary of 150,000 are 1.2 GB in 16 bits.
CHUNK = 4096


@dataclass(frozen=True)
class BlockPlan:
    """The matmul outputs that a block saves, by name, and the bytes that it offloads."""

    kept: tuple[str, ...] = PRODUCTS
    moved: int = 0


def parsed(text: str, num_layers: int) -> tuple[str, int | str]:
    """Return the name and the argument ("" for none) of a strategy for ``num_layers`` blocks.

    Raises ValueError, in one line, for a name that is not in ``STRATEGIES``, and for an argument
    that is missing, not asked for, outside 1 to num_layers (k) or not in ``OPS`` (ops).
    """
    name, colon, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
    takes = STRATEGIES.get(name)
    if takes is None or bool(takes) != bool(colon):
        forms = [f"{name}:{form}" if form else name for name, form in STRATEGIES.items()]
        raise ValueError(f"checkpointing {text!r}: allowed are {', '.join(forms)}")
    if takes == "ops" and argument not in OPS:
        raise ValueError(f"checkpointing {text!r}: allowed as ops are {', '.join(OPS)}")
    if takes != "k":
        return name, argument
    # Python takes no number of thousands of digits.
    k = int(argument[:20]) if argument.isascii() and argument.isdigit() else 0
    if not 1 <= k <= num_layers:
        raise ValueError(f"checkpointing {text!r}: allowed as k are 1 to {num_layers}")
    return name, k
