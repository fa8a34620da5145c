"""Pipeline, expert and context parallelism, as far as one plans with them.

For each axis: bytes that a device sends, and the condition under which its communication hides
behind its computation. Letters as in parallelism.py: D d_model, F d_ff, C operations and W bytes a
second of a device; elements have two bytes unless said otherwise.

Pipelines: Huang et al., 2019 (GPipe), Narayanan et al., 2019 (1F1B) and 2021 (interleaved stages),
Qi et al., 2024 (zero bubble: ZB-H1 and ZB-H2).
Experts: Lepikhin et al., 2021 (GShard). Context: Liu et al., 2023 (ring attention).
"""

from a2lib.theory.collectives import positive
from a2lib.theory.products import check_name, largest

PIPELINES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")


def check_pipeline(kind: str, stages: int, microbatches: int, chunks: int) -> None:
    """Raise ValueError for what ``bubble_share`` refuses."""
    check_name("pipeline", kind, PIPELINES)
    positive(stages=stages, microbatches=microbatches, chunks=chunks)
    if kind != "interleaved" and chunks != 1:
        raise ValueError(f"chunks is {chunks}; allowed is 1, except for an interleaved pipeline")
    if kind == "interleaved" and microbatches % stages:
        raise ValueError(
            f"microbatches is {microbatches}; allowed are multiples of the {stages} stages"
        )
    if microbatches < (least := least_microbatches(kind, stages)):
        raise ValueError(f"microbatches is {microbatches}; allowed in {kind} are {least} or more")


def least_microbatches(kind: str, stages: int) -> int:
    """The fewest that a pipeline's order has work for: those of zero bubble."""
    return {"zb-h1": stages, "zb-h2": 2 * stages - 1}.get(kind, 1)


def bubble_share(kind: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """The share of a step in which a stage has nothing to do: (p - 1) / (v m + p - 1).

    ``chunks`` is v, the pieces of the model on each device. GPipe and 1F1B wait equally long. Zero
    bubble is of forward, inputs' gradients and weights' gradients of equal length: ZB-H1 waits a
    third of 1F1B's, ZB-H2 not at all. Raises ValueError for an unknown kind, more than one chunk
    where the kind has none, micro-batches that the stages do not divide where it has, or fewer than
    ``least_microbatches``.
    """
    check_pipeline(kind, stages, microbatches, chunks)
    waits = bubble_s(kind, stages, 1, 1, 1, chunks)
    return waits / (3 * microbatches + waits)


def bubble_s(kind, stages, forward_s, input_s, weight_s, chunks=1):
    """Seconds that a stage waits in a step, of a micro-batch's forward and the gradients of its
    inputs and of its weights: (p - 1)(F + B + W) / v, of ZB-H1 (p - 1)(F + B - W), and of ZB-H2
    (p - 1)(F + B - 2 W), whose stages begin and end one after another."""
    late = {"zb-h1": -1, "zb-h2": -2}.get(kind, 1)
    return (stages - 1) * (forward_s + input_s + late * weight_s) / chunks


def peak_microbatches(
    kind: str, stages: int, microbatches: int, chunks: int = 1, stage: int = 0
) -> float:
    """Micro-batches whose activations ``stage`` (from 0) holds at its peak, in stages' worth.

    GPipe: m. 1F1B: the stages from it on, at most m. Interleaved: p + (p - 1 - 2 stage) / v, at
    most m. ZB-H1: p, and ZB-H2: 2 p - 1, of each stage, until weights have their gradients. Errors
    as ``bubble_share``.
    """
    check_pipeline(kind, stages, microbatches, chunks)
    if kind == "gpipe":
        return microbatches
    held = {
        "1f1b": stages - stage,
        "interleaved": stages + (stages - 1 - 2 * stage) / chunks,
        "zb-h1": stages,
        "zb-h2": 2 * stages - 1,
    }
    return min(held[kind], microbatches)


def microbatches_for(kind: str, stages: int, share: float, chunks: int = 1) -> int:
    """The fewest micro-batches with a bubble of at most ``share`` of the step.

    Raises ValueError unless the share lies between 0 and 1, and as ``bubble_share``.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share!r}; allowed are numbers between 0 and 1")
    step = stages if kind == "interleaved" else 1
    m = max(step, least_microbatches(kind, stages))
    check_pipeline(kind, stages, m, chunks)
    return m + step * largest(
        lambda k: bubble_share(kind, stages, m + k * step - step, chunks) > share
    )


def least_stage_layers(d_ff, flops, bandwidth):
    """SwiGLU layers that a piece must hold for a boundary to take no longer than its forward.

    C / (3 F W): a token's 2 D bytes against 6 D F operations a layer. The batch cancels.
    """
    positive(d_ff=d_ff, flops=flops, bandwidth=bandwidth)
    return flops / (3 * d_ff * bandwidth)


def least_expert_width(n, flops, bandwidth):
    """The d_ff of an expert from which the two all-to-alls hide: 2 (n - 1) C / (3 n W).

    Neither the tokens nor top_k matter. The price of experts is elsewhere: FSDP moves the weights
    of all of them for the operations of top_k.
    """
    positive(n=n, flops=flops, bandwidth=bandwidth)
    return 2 * (n - 1) * flops / (3 * n * bandwidth)


def least_tokens_with_experts(flops, bandwidth, experts, top_k):
    """Tokens per device from which FSDP hides under a layer of experts: C E / (k W).

    ``experts / top_k`` times the C / W of a dense layer, for many devices.
    """
    positive(flops=flops, bandwidth=bandwidth, experts=experts, top_k=top_k)
    return flops * experts / (bandwidth * top_k)


def ring_attention_bytes(tokens, d_kv, n, element_bytes=2):
    """Bytes that a device sends in a forward over a sequence of n times ``tokens``.

    Keys and values, ``d_kv`` wide each, go round the ring in n - 1 rounds while the device attends
    to what it holds.
    """
    positive(tokens=tokens, d_kv=d_kv, n=n)
    return (n - 1) * 2 * element_bytes * tokens * d_kv


def least_ring_tokens(d_model, d_kv, flops, bandwidth, causal=False):
    """Tokens per device from which a round of ring attention hides: C d_kv / (W D), twice that if
    causal. With as many key heads as query heads it is C / W."""
    positive(d_model=d_model, d_kv=d_kv, flops=flops, bandwidth=bandwidth)
    return flops * d_kv / (bandwidth * d_model) * (2 if causal else 1)
