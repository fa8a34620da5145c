"""One shape by several protocols: how much of a time is the way it was taken.

burst: as the sweep measures, the implementations in turns, a tenth of a second each.
sustained: calls without pause for ten seconds after a rest, a row for each second. Each is timed as
in the burst, between events and behind a flush of the L2 cache: what differs is the clock, and its
reason the power.
board: as the course's public leaderboard of 2025 times an entry: three-dimensional inputs, the
function compiled, its output summed and differentiated, ``triton.testing.do_bench`` for ten seconds
after one of warm-up. ``ms_mean`` is the board's figure.
fixed_order: the burst under ``torch.use_deterministic_algorithms``.
first: one call, in a process of its own that finds nothing compiled; its seconds 1 and 2 are the
next calls, of other lengths, neither a multiple of a block. Ours has the forms of the first at one
and another forward at the other.
host, host_compiled: what issuing a call over one head of few tokens takes the host, in turns, as it
is and compiled whole by ``torch.compile``. Also of the forward alone, without gradients.

All others are forward and backward. Nothing is timed whose output and gradients are not right.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from a2lib.experiments.flash import peers, sanity
from a2lib.experiments.flash.shapes import Parameters, Shape, sweep_shapes
from a2lib.experiments.flash.turns import TIMING
from a2lib.experiments.harness import Job, Row, Task
from a2lib.experiments.passes import one_pass, random
from a2lib.lab import FLASH_PROTOCOL, Timing, inductor, program, synchronize, time_many
from a2lib.lab.clock import Clock
from a2lib.lab.device import Watch
from a2lib.lab.sustained import seconds_of

PASS = "end_to_end"
N_SECONDS = 10
# A "second" of the sustained protocol: shorter where it is only to be tried.
SECOND_S = {"cuda": 1.0, "cpu": 0.02}
IDLE_S = {"cuda": 2.0, "cpu": 0.0}
IMPLEMENTATIONS = {"cuda": ("a2lib", "sdpa_cudnn", "sdpa_flash"), "cpu": ("eager", "sdpa_flash")}
OTHERS = {
    "cuda": {
        # The reference compiled is what the board's entries are set against.
        "board": (*IMPLEMENTATIONS["cuda"], "compile"),
        "fixed_order": ("a2lib", "sdpa_flash"),  # cuDNN has none
        "first": ("a2lib", "sdpa_cudnn", "flex"),
        "host": ("a2lib", "sdpa_flash"),
        "host_compiled": ("a2lib", "sdpa_flash"),
    },
    # The host does the work itself.
    "cpu": {"first": ("eager",), "host": (), "host_compiled": ()},
}
HOST_LENGTH, HOST_CALLS, HOST_TURNS = 512, 20, 50
BOARD_MS = {"warmup": 1000, "rep": 10000}
FIRST_LENGTHS = (1, 0.8, 0.9)  # of the shape's
FIRST_S = 120  # below the silence that a worker is allowed

prepare = peers.configure
Calls = Mapping[str, Callable[[], object]]


def tasks(given: Parameters, device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"); [] for a sweep without these protocols. The
    row of second 0 is asked for, which every measurement has."""
    (shape,) = sweep_shapes("leaderboard", tiny=device == "cpu")
    made = []
    for protocol, (_, timed) in PROTOCOLS.items() if given.has("leaderboard") else ():
        listed = OTHERS[device].get(protocol, IMPLEMENTATIONS[device])
        asked = given.chosen_implementations(shape, device)
        chosen = [name for name in listed if name in asked]
        # In turns is one measurement; the others are one for each.
        groups = [chosen] if timed in (_burst, _host) else [[name] for name in chosen]
        here, passes = shape, (PASS,)
        if timed is _host:
            here = dataclasses.replace(shape, heads=1, seq_len=HOST_LENGTH)
            passes = (PASS, "forward")
        for names, pass_ in itertools.product(filter(None, groups), passes):
            spec = {"protocol": protocol, "shape": dataclasses.asdict(here), "pass": pass_}
            spec["implementations"] = names
            keys = (key(protocol, here, name, pass_) for name in names)
            made.append(Task.whole(f"{protocol} {pass_} {' '.join(names)}", spec, keys))
    return made


def key(protocol: str, shape: Shape, implementation: str, pass_: str) -> Row:
    """The key columns of the row of second 0."""
    return {"protocol": protocol, **shape.key(implementation, pass_), "second": 0}


def measure(job: Job) -> None:
    """The rows of one task; an implementation that fails has one row, of second 0.

    Second 0 comes last, so that what has it is complete. Raises failures.LostContext, after the
    rows, where the device has to be reset.
    """
    import torch

    torch._dynamo.reset()
    protocol, shape = job.spec["protocol"], Shape(**job.spec["shape"])
    pass_ = job.spec["pass"]
    make, timed = PROTOCOLS[protocol]
    calls: dict[str, Callable] = {}
    results: dict[str, list[Row] | Exception] = {}
    for name in job.spec["implementations"]:
        try:
            if protocol == "board" and job.device == "cpu":
                raise NotImplementedError("triton.testing.do_bench needs a GPU")
            asked = {"pass_": pass_} if timed is _host else {}
            calls[name] = make(name, shape, job.device, job.seed, **asked)
        except Exception as error:
            results[name] = error
    if calls:
        try:
            results |= timed(calls, job.device)
        except Exception as error:
            results |= dict.fromkeys(calls, error)
    for name in job.spec["implementations"]:
        result = results[name]
        if isinstance(result, Exception):
            job.fail(result, [key(protocol, shape, name, pass_)])
            continue
        for row in reversed(result):
            job.put(key(protocol, shape, name, pass_) | {"status": "ok", "note": ""} | row)


def burst_call(
    name: str, shape: Shape, device: str, seed: int,
    *, pass_: str = PASS, compiled: bool = False, fixed_order: bool = False,
) -> Callable[[], object]:  # fmt: skip
    """A pass of one implementation on ``(B, H, N, d)``, found right; a forward alone is that of
    tensors that want no gradient. With ``fixed_order`` the order of additions does not change."""
    import torch

    peers.check(name, device)
    *qkv, do = peers.inputs(shape, device, seed)
    forward = peers.build(name, shape, device)
    if compiled:
        forward = torch.compile(forward, fullgraph=True)
    expected = sanity.Expected(*qkv, do, causal=shape.causal, dtype=shape.dtype)
    with _fixed_order() if fixed_order else contextlib.nullcontext():
        expected.check(forward, qkv)
    if pass_ == "forward":
        torch._dynamo.reset()  # without gradients is another graph, and compiling again an error
        qkv = [x.detach() for x in qkv]
    call = one_pass(forward, qkv, do, pass_)
    return _fixed_order()(call) if fixed_order else call


@contextlib.contextmanager
def _fixed_order() -> Iterator[None]:
    import torch
    import torch.utils.deterministic as settings

    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # each new tensor, which is no part of attention
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = True  # as it comes


def first_calls(name: str, shape: Shape, device: str, seed: int) -> Callable[[], list[float]]:
    """Ms of the first call and of those of other lengths, in a process of its own each time."""
    burst_call(name, shape, device, seed)  # is it right?
    asked = [name, dataclasses.asdict(shape), device, seed]

    def call() -> list[float]:
        command = [sys.executable, "-m", __spec__.name, json.dumps(asked)]
        said = program.run("the first call", command, FIRST_S).splitlines()
        return json.loads(next(line for line in said if line.startswith("[[")))[0]

    return call


def main(text: str) -> None:
    """That process: what ``first_calls`` asks for, with empty caches."""
    name, sizes, device, seed = json.loads(text)
    shape, took = Shape(**sizes), []
    with inductor.empty_folder() as folder, inductor.caches_in(folder):
        peers.configure()
        for part in FIRST_LENGTHS:
            here = dataclasses.replace(shape, seq_len=int(part * shape.seq_len))
            inductor.forget()  # FlexAttention's, which takes no other length
            *qkv, do = peers.inputs(here, device, seed)
            call = one_pass(peers.build(name, here, device), qkv, do, PASS)
            synchronize(device)
            begun = time.perf_counter()
            call()
            synchronize(device)
            took.append(1e3 * (time.perf_counter() - begun))
    print(json.dumps([took]))  # among whatever the libraries say


def board_call(name: str, shape: Shape, device: str, seed: int) -> Callable[[], object]:
    """What the board times, on ``(H, N, d)``: ``shape`` has to be of batch 1."""
    import torch
    import torch._functorch.config

    peers.check(name, device)
    sizes, how = (shape.heads, shape.seq_len, shape.head_dim), random(shape.dtype, device, seed)
    # The gradients are of one tensor, the three are views of it.
    qkv = torch.randn(3, *sizes, **how, requires_grad=True).unbind()
    do = torch.randn(sizes, **how)
    flash = torch.compile(board_function(name, shape))

    def forward(q, k, v) -> torch.Tensor:
        return flash(q, k, v, shape.causal)

    expected = sanity.Expected(*qkv, do, causal=shape.causal, dtype=shape.dtype)
    # PyTorch's default, which holding a graph for several backwards has to do without.
    with torch._functorch.config.patch(donated_buffer=True):
        expected.check(forward, qkv)
    return lambda: forward(*qkv).sum().backward()


def board_function(name: str, shape: Shape) -> Callable:
    """``(q, k, v, is_causal) -> o`` on three dimensions, to be compiled."""
    if name == "a2lib":
        from a2lib.attention import FlashAttentionTriton

        return FlashAttentionTriton.apply
    if name in ("eager", "compile"):
        from a2lib.attention import attention_reference

        return attention_reference
    forward = peers.build(name, shape)

    def four_dimensions(q, k, v, is_causal):  # the fused backends take no other
        return forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)

    return four_dimensions


def _burst(calls: Calls, device: str) -> dict[str, list[Row] | Exception]:
    timed = time_many(calls, device=device, **TIMING[device])
    return {n: t if isinstance(t, Exception) else [t.row(FLASH_PROTOCOL)] for n, t in timed.items()}


def _sustained(calls: Calls, device: str) -> dict[str, list[Row]]:
    ((name, call),) = calls.items()
    seconds = seconds_of(
        call, device=device, n_seconds=N_SECONDS, second_s=SECOND_S[device], idle_s=IDLE_S[device]
    )
    rows = [(s, s.timing.row(FLASH_PROTOCOL)) for s in seconds]
    return {name: [row | {"second": s.second, "power_w": s.power_w} for s, row in rows]}


def _board(calls: Calls, device: str) -> dict[str, list[Row]]:
    from triton.testing import do_bench

    ((name, call),) = calls.items()
    with Watch() as watch:
        samples = do_bench(call, **BOARD_MS, return_mode="all")
    row = Timing.from_samples(samples, mhz=watch.mhz).row(FLASH_PROTOCOL)
    return {name: [row | {"power_w": watch.power_w()}]}


def _first(calls: Calls, device: str) -> dict[str, list[Row]]:
    ((name, call),) = calls.items()
    rows = [Timing.from_samples([took]).row(FLASH_PROTOCOL) for took in call()]
    return {name: [row | {"second": second} for second, row in enumerate(rows)]}


def _host(calls: Calls, device: str) -> dict[str, list[Row]]:
    clock, taken = Clock(device), {name: [] for name in calls}
    for _ in range(HOST_TURNS):
        for name, call in calls.items():
            call()  # what another has left in the caches is its own
            taken[name].append(clock.host(call, HOST_CALLS))
    return {name: [Timing.from_samples(taken[name]).row(FLASH_PROTOCOL)] for name in calls}


PROTOCOLS = {  # how each makes its call, and how it times calls
    "burst": (burst_call, _burst),
    "sustained": (burst_call, _sustained),
    "board": (board_call, _board),
    "fixed_order": (functools.partial(burst_call, fixed_order=True), _burst),
    "first": (first_calls, _first),
    "host": (burst_call, _host),
    "host_compiled": (functools.partial(burst_call, compiled=True), _host),
}

if __name__ == "__main__":
    main(sys.argv[1])
