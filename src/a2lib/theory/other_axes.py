"""Pipeline, expert and context parallelism: bubbles, bytes sent, and when communication hides.

Letters are those of parallelism.py: D d_model, F d_ff, C FLOPs and W bytes per second of a device.
Elements have two bytes unless said otherwise.

Pipelines: Huang et al., 2019 (GPipe), Narayanan et al., 2019 (1F1B) and 2021 (interleaved stages),
Qi et al., 2024 (zero bubble, ZB-H1).
Experts: Lepikhin et al., 2021 (GShard). Context: Liu et al., 2023 (ring attention).
"""

from a2lib.checks import check_name
from a2lib.theory.collectives import positive

PIPELINES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def bubble_share(kind: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the share of a step in which a stage is idle: (p - 1) / (v m + p - 1).

    ``chunks`` is v, the virtual stages on each device. GPipe and 1F1B are idle equally long. Under
    ZB-H1 a stage is idle for a third of 1F1B's time, if forward, gradients of inputs and gradients
    of weights take equally long. Raises ValueError for another kind.
    """
    check_name("pipeline", kind, PIPELINES)
    positive(stages=stages, microbatches=microbatches, chunks=chunks)
    waits = (stages - 1) / (3 if kind == "zb-h1" else chunks)
    return waits / (microbatches + waits)


def peak_microbatches(
    kind: str, stages: int, microbatches: int, chunks: int = 1, stage: int = 0
) -> float:
    """Return how many micro-batches' activations ``stage`` (from 0) holds at its peak.

    gpipe: m
    1f1b: p - stage
    interleaved: p + (p - 1 - 2 stage) / v
    zb-h1: p on each stage, until weights have their gradients

    It is never more than m. Raises ValueError as ``bubble_share``.
    """
    check_name("pipeline", kind, PIPELINES)
    if kind == "gpipe":
        return microbatches
    held = {
        "1f1b": stages - stage,
        "interleaved": stages + (stages - 1 - 2 * stage) / chunks,
        "zb-h1": stages,
    }
    return min(held[kind], microbatches)


def least_stage_layers(d_ff, flops, bandwidth):
    """Return the SwiGLU layers a stage needs so that sending takes no longer than its forward.

    C / (3 F W): a token's 2 D bytes against 6 D F FLOPs per layer. The batch cancels.
    """
    positive(d_ff=d_ff, flops=flops, bandwidth=bandwidth)
    return flops / (3 * d_ff * bandwidth)


def least_expert_width(n, flops, bandwidth):
    """Return the d_ff of an expert from which the two all-to-alls hide: 2 (n - 1) C / (3 n W).

    Neither the tokens nor top_k matter.
    """
    positive(n=n, flops=flops, bandwidth=bandwidth)
    return 2 * (n - 1) * flops / (3 * n * bandwidth)


def ring_attention_bytes(tokens, d_kv, n, element_bytes=2):
    """Return the bytes that a device sends in ring attention's forward.

    The sequence has n times ``tokens``. Keys and values, ``d_kv`` wide each, travel round the ring
    in n - 1 rounds, while the device attends to those that it has.
    """
    positive(tokens=tokens, d_kv=d_kv, n=n)
    return (n - 1) * 2 * element_bytes * tokens * d_kv


def least_ring_tokens(d_model, d_kv, flops, bandwidth, causal=False):
    """Return the tokens per device from which a round of ring attention hides: C d_kv / (W D), or
    twice that if causal."""
    positive(d_model=d_model, d_kv=d_kv, flops=flops, bandwidth=bandwidth)
    return flops * d_kv / (bandwidth * d_model) * (2 if causal else 1)
