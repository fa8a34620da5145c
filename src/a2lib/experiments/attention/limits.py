"""What a worker does for the longest sequence that fits: predicted from free memory, then tried."""

from __future__ import annotations

import functools
from collections.abc import Callable

from a2lib.attention import attention_reference
from a2lib.experiments.attention import STEP, Shape, handlers
from a2lib.experiments.attention.handlers import Row, inputs_of
from a2lib.experiments.harness.worker import Job, free_memory
from a2lib.experiments.passes import one_pass
from a2lib.measure import memory, synchronize
from a2lib.measure.failures import outcome
from a2lib.measure.memory import expandable_segments, take_workspaces
from a2lib.theory.eager import longest

prepare = handlers.prepare


def limit(job: Job) -> None:
    """The longest sequence whose pass fits this GPU: predicted from the free memory, then tried."""
    if job.device == "cpu":
        return job.refuse("unsupported", "a CPU does not refuse memory: it swaps")
    for key in job.keys:
        expandable_segments(key["allocator"] == "expandable")
        try:
            job.put({**key, "status": "ok", **_limit(key, job)})
        finally:
            expandable_segments(False)


def _limit(key: Row, job: Job) -> Row:
    take_workspaces("cuda")
    free_memory("cuda")
    free = memory.free_bytes("cuda")
    sizes = key["batch"], key["head_dim"], key["causal"], free, key["pass"]
    tensors = longest(*sizes, step=STEP)
    in_blocks = key["allocator"] == "blocks"
    predicted = longest(*sizes, step=STEP, how="blocks") if in_blocks else tensors
    fits = search(functools.partial(_fits, key, job), predicted, STEP)
    return {
        "room_bytes": free,
        "tensors_len": tensors,
        "predicted_len": predicted,
        "fits_len": fits,
        "fails_len": fits + STEP,
    }


def search(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """The largest multiple of ``step`` that ``fits``, from ``guess`` on; 0 for none. Smaller ones
    than one that fits are taken to fit."""
    if guess and fits(guess):
        while fits(guess + step):
            guess += step
        return guess
    while guess > 0:
        guess -= step
        if guess > 0 and fits(guess):
            return guess
    return 0


def _fits(key: Row, job: Job, seq_len: int) -> bool:
    shape = Shape(key["dtype"], key["batch"], seq_len, key["head_dim"], key["causal"])
    fitted = True
    try:
        *qkv, do = inputs_of(shape, "cuda", job.seed, key["pass"])
        attend = functools.partial(attention_reference, is_causal=shape.causal)
        one_pass(attend, qkv, do, key["pass"])()
        synchronize("cuda")
    except Exception as error:
        if outcome(error) != "oom":
            raise
        fitted = False
    qkv = do = None
    free_memory("cuda")  # here, since the exception has let go of its frames
    return fitted
