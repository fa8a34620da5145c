"""Activation checkpointing: choose which activations of the blocks are saved for the backward.

A strategy is a function ``run(blocks, x) -> x`` that calls the blocks in order on ``x``.
``strategy(text, num_layers)`` makes one from its name, with an argument after a colon where it
takes one:

    none            save everything
    half            save the input of each block's attention and of each block's FFN, and recompute
                    either in the backward
    block           save each block's input and recompute the block
    segments:k      the same for k blocks at a time (the last segment may have fewer)
    nested:k        segments of k; within a segment that is recomputed, each block by itself
    recursive       halves, whose halves are recomputed in halves, down to one block
    chain           save the first input only: each block is recomputed from the start
    selective:ops   each block by itself, with the results of some operations saved: ops is linear
                    (its seven linear layers), products (these and the two matmuls of eager
                    attention) or attention (its result, where it is one operation: not eager's)

- All have the loss and the gradients of ``none`` to the bit, if the operations are deterministic.
- Recomputation stops once it has what the backward lacks (PyTorch's early stop): the last matmul of
  a segment is not repeated.
- Under autocast pass ``cache_enabled=False``: its cache of 16-bit weights outlives each segment.
- ``a2lib.theory.memory.checkpointing`` has the memory and the work of each.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), for segments and
recursion; PyTorch's ``torch.utils.checkpoint`` for selection by operation.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from a2lib.activations import ATTENTION_PRODUCTS, FFN_PRODUCTS, PRODUCTS, parsed
from a2lib.checks import check_name

Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Call each block in order on ``x``: the strategy that saves everything."""
    for block in blocks:
        x = block(x)
    return x


def _again(function: Callable, *arguments, **options):
    """Call ``function(*arguments)`` under activation checkpointing: save its arguments only, and
    recompute the rest in the backward."""
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here draws random numbers
        **options,
    )


def _segments(k: int, run: Run = run_blocks) -> Run:
    """Return the strategy that runs ``run`` on k blocks at a time and recomputes it."""

    def run_segments(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        blocks = list(blocks)
        for start in range(0, len(blocks), k):
            x = _again(run, blocks[start : start + k], x)
        return x

    return run_segments


def _nested(k: int) -> Run:
    return _segments(k, _segments(1))


def _halves(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, each=(_again, _again))
    return x


def _recursive(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    blocks = list(blocks)
    if len(blocks) == 1:
        return _again(blocks[0], x)
    # The first half is the longer one: beside it only the other half's input is saved.
    middle = (len(blocks) + 1) // 2
    for half in (blocks[:middle], blocks[middle:]):
        # One block needs no checkpoint around its own.
        x = _recursive(half, x) if len(half) == 1 else _again(_recursive, half, x)
    return x


def _chain(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    *before, last = blocks
    if not before:
        return _again(last, x)
    return _again(lambda x: last(_chain(before, x)), x)


def _selective(ops: str) -> Run:
    contexts = functools.partial(create_selective_checkpoint_contexts, [*KEPT[ops]])

    def run(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = _again(block, x, context_fn=contexts)
        return x

    return run


@functools.cache
def keeping(names: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Return ``each`` for a block's call that saves the results of some linear layers.

    Besides those, named as in ``a2lib.activations.PRODUCTS``, the input of either half and
    attention's result are saved, and everything else is recomputed. Raises ValueError for another
    name.
    """
    for name in names:
        check_name("kept", name, PRODUCTS)

    def half(products: tuple[str, ...]) -> Callable:
        contexts = functools.partial(_counting, tuple(name in names for name in products))
        return lambda function, x: _again(function, x, context_fn=contexts)

    return half(ATTENTION_PRODUCTS), half(FFN_PRODUCTS)


def _counting(kept: tuple[bool, ...]):
    """Return checkpoint contexts that save attention's results, and of the linear layers' results
    those whose place in the order of calls ``kept`` marks."""
    places = {False: iter(kept), True: iter(kept)}  # of the forward; of computing again

    def policy(context, operation, *arguments, **options) -> CheckpointPolicy:
        must = operation in KEPT["attention"]
        if operation in KEPT["linear"]:
            must = next(places[context.is_recompute], False)  # the last one no backward wants
        return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _kept_operations() -> dict[str, frozenset]:
    import a2lib.attention  # noqa: F401  defines a2lib::flash_forward

    aten = torch.ops.aten
    linear = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    attention = {getattr(aten, name).default for name in names}
    attention.add(torch.ops.a2lib.flash_forward.default)
    return {
        "linear": frozenset(linear),
        "products": frozenset(linear | {aten.bmm.default}),
        "attention": frozenset(attention),
    }


KEPT = _kept_operations()

# How each is made of what it takes (``a2lib.activations.STRATEGIES``).
STRATEGIES: dict[str, Callable[..., Run]] = {
    "none": lambda: run_blocks,
    "half": lambda: _halves,
    "block": lambda: _segments(1),
    "segments": _segments,
    "nested": _nested,
    "recursive": lambda: _recursive,
    "chain": lambda: _chain,
    "selective": _selective,
}


def strategy(text: str, num_layers: int) -> Run:
    """Return the strategy that ``text`` names, for a model of ``num_layers`` blocks.

    Raises ValueError as ``a2lib.activations.parsed``.
    """
    name, argument = parsed(text, num_layers)
    return STRATEGIES[name](*([argument] if argument else []))
