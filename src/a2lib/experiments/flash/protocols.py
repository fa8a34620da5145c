"""One shape by several protocols: how much of a time is the way it was taken.

burst: as the sweep measures, the implementations in turns, a tenth of a second each.
sustained: calls without pause for ten seconds after a rest, a row for each second. Each is timed as
in the burst, between events and behind a flush of the L2 cache: what differs is the clock, and its
reason the power.
board: as the course's public leaderboard of 2025 times an entry: three-dimensional inputs, the
function compiled, its output summed and differentiated, ``triton.testing.do_bench`` for ten seconds
after one of warm-up. ``ms_mean`` is the board's figure.

All are forward and backward. Nothing is timed whose output and gradients are not right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from a2lib.experiments.flash import comparison, peers, sanity
from a2lib.experiments.flash.shapes import Parameters, Shape, sweep_shapes
from a2lib.experiments.harness.sweep import Task
from a2lib.measure import FLASH_PROTOCOL, Timing, failures, time_many
from a2lib.measure.sustained import seconds_of
from a2lib.measure.watch import Watch

PROTOCOLS = ("burst", "sustained", "board")
PASS = "end_to_end"
N_SECONDS = 10
# A "second" of the sustained protocol: shorter where it is only to be tried.
SECOND_S = {"cuda": 1.0, "cpu": 0.02}
IDLE_S = {"cuda": 2.0, "cpu": 0.0}
IMPLEMENTATIONS = {"cuda": ("a2lib", "sdpa_cudnn", "sdpa_flash"), "cpu": ("eager", "sdpa_flash")}
# The reference compiled is what the board's entries are set against.
BOARD = {"cuda": (*IMPLEMENTATIONS["cuda"], "compile"), "cpu": IMPLEMENTATIONS["cpu"]}
BOARD_MS = {"warmup": 1000, "rep": 10000}

Row = dict[str, object]


def tasks(parameters: Parameters, device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"); [] for a sweep without these protocols."""
    if parameters.sweep not in ("leaderboard", "all"):
        return []
    (shape,) = sweep_shapes("leaderboard", tiny=device == "cpu")
    made = []
    for protocol in PROTOCOLS:
        listed = (BOARD if protocol == "board" else IMPLEMENTATIONS)[device]
        asked = parameters.chosen_implementations(shape, device)
        chosen = [name for name in listed if name in asked]
        # In turns is one measurement; the others are one for each.
        groups = [chosen] if protocol == "burst" else [[name] for name in chosen]
        for names in filter(None, groups):
            label = f"{protocol} {' '.join(names)}"
            spec = {
                "protocol": protocol,
                "shape": dataclasses.asdict(shape),
                "implementations": names,
            }
            keys = tuple(key(protocol, shape, name) for name in names)
            made.append(Task(label, spec, {label: keys}))
    return made


def key(protocol: str, shape: Shape, implementation: str) -> Row:
    """The key columns of the row of second 0, which every measurement has."""
    return {"protocol": protocol, **shape.key(implementation, PASS), "second": 0}


def measure(spec: Mapping[str, object], device: str, seed: int) -> Iterator[Row]:
    """The rows of one of ``tasks``; an implementation that fails has one row, of second 0.

    Second 0 comes last, so that what has it is complete. Raises failures.LostContext, after the
    rows, where the device has to be reset.
    """
    shape = Shape(**spec["shape"])
    protocol, names = spec["protocol"], spec["implementations"]
    calls: dict[str, Callable] = {}
    failed: dict[str, BaseException] = {}
    results: dict[str, list[Row]] = {}
    if protocol == "board" and device == "cpu":
        reason = NotImplementedError("triton.testing.do_bench needs a GPU")
        failed = dict.fromkeys(names, reason)
    else:
        make = board_call if protocol == "board" else burst_call
        for name in names:
            try:
                calls[name] = make(name, shape, device, seed)
            except Exception as error:
                failed[name] = error
        timed = {"burst": _burst, "sustained": _sustained, "board": _board}[protocol]
        if calls:
            for name, result in timed(calls, device).items():
                (failed if isinstance(result, BaseException) else results)[name] = result
    lost = None
    for name in names:
        if name in failed:
            status, note = failures.classify(failed[name])
            lost = note if failures.is_lost(failed[name]) else lost
            rows = [{"status": status, "note": note}]
        else:
            rows = results[name]
        for row in reversed(rows):
            yield key(protocol, shape, name) | {"note": ""} | row
    if lost:
        raise failures.LostContext(lost)


def burst_call(name: str, shape: Shape, device: str, seed: int) -> Callable[[], object]:
    """Forward and backward of one implementation on ``(B, H, N, d)``, found right."""
    import torch

    _raise_unsupported(name, device)
    *qkv, do = peers.inputs(shape, device, seed)
    forward = peers.build(name, shape, device)
    _check(lambda: forward(*qkv), qkv, do, shape)
    return lambda: torch.autograd.grad(forward(*qkv), qkv, do)


def board_call(name: str, shape: Shape, device: str, seed: int) -> Callable[[], object]:
    """What the board times, on ``(H, N, d)``: ``shape`` has to be of batch 1."""
    import torch
    import torch._functorch.config

    _raise_unsupported(name, device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    sizes = (shape.heads, shape.seq_len, shape.head_dim)
    options = {
        "device": device,
        "dtype": dtype,
        "generator": torch.Generator(device).manual_seed(seed),
    }
    # The gradients are of one tensor, the three are views of it.
    qkv = torch.randn(3, *sizes, **options, requires_grad=True).unbind()
    do = torch.randn(sizes, **options)
    flash = torch.compile(board_function(name, shape))

    def forward() -> torch.Tensor:
        return flash(*qkv, shape.causal)

    # PyTorch's default, which holding a graph for several backwards has to do without.
    with torch._functorch.config.patch(donated_buffer=True):
        _check(forward, qkv, do, shape)
    return lambda: forward().sum().backward()


def board_function(name: str, shape: Shape) -> Callable:
    """``(q, k, v, is_causal) -> o`` on three dimensions, to be compiled."""
    if name == "a2lib":
        from a2lib.attention import FlashAttentionTriton

        return FlashAttentionTriton.apply
    if name in ("eager", "compile"):
        from a2lib.attention import attention_reference

        return lambda q, k, v, is_causal: attention_reference(q, k, v, is_causal)
    forward = peers.build(name, shape)

    def four_dimensions(q, k, v, is_causal):  # the fused backends take no other
        return forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)

    return four_dimensions


def _raise_unsupported(name: str, device: str) -> None:
    reason = peers.unsupported(name, device)
    if reason:
        raise NotImplementedError(reason)


def _check(forward: Callable[[], object], qkv: Sequence, do, shape: Shape) -> None:
    """Raise sanity.WrongResult unless ``forward()`` and its gradients for ``qkv`` are right."""
    import torch

    def batched(x):
        return x.reshape(shape.batch, shape.heads, shape.seq_len, shape.head_dim)

    inputs = (batched(x.detach()) for x in (*qkv, do))
    expected = sanity.Expected(*inputs, causal=shape.causal, dtype=shape.dtype)
    o = forward()
    expected.check_output(batched(o.detach()))
    gradients = torch.autograd.grad(o, qkv, expected.do.reshape(do.shape))
    expected.check_gradients(*(batched(x) for x in gradients))


def _burst(calls: dict[str, Callable], device: str) -> dict[str, list[Row] | Exception]:
    timed = time_many(calls, device=device, **comparison.TIMING[device])
    return {n: t if isinstance(t, Exception) else [_row(t)] for n, t in timed.items()}


def _sustained(calls: dict[str, Callable], device: str) -> dict[str, list[Row] | Exception]:
    ((name, call),) = calls.items()
    try:
        seconds = seconds_of(
            call,
            device=device,
            n_seconds=N_SECONDS,
            second_s=SECOND_S[device],
            idle_s=IDLE_S[device],
        )
    except Exception as error:
        return {name: error}
    return {name: [_row(s.timing) | {"second": s.second, "power_w": s.power_w} for s in seconds]}


def _board(calls: dict[str, Callable], device: str) -> dict[str, list[Row] | Exception]:
    ((name, call),) = calls.items()
    try:
        from triton.testing import do_bench

        with Watch() as watch:
            samples = do_bench(call, **BOARD_MS, return_mode="all")
    except Exception as error:
        return {name: error}
    row = _row(Timing.of(samples, mhz=watch.mhz))
    return {name: [row | {"power_w": watch.power_w()}]}


def _row(timing: Timing) -> Row:
    return {"second": 0, "status": "ok"} | timing.row(FLASH_PROTOCOL)
