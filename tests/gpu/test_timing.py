"""CUDA graphs on a real GPU: a replay is the whole call, a failed capture harms nothing else."""

import functools
import time

import pytest
import torch
from attention_inputs import inputs
from notebook_cells import load_cells

from a2lib.lab import graphs, time_many
from a2lib.lab.device import Sensors
from a2lib.parallel.graphs import CudaGraphs

pytestmark = pytest.mark.gpu

SIZES = 2, 2, 256, 64
# It sums in one order always; the others' backward adds with atomics, or may.
SAME_BITS = ("eager",)
NAMES = (*SAME_BITS, "a2lib", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
NAMES += ("compile", "flex", "compiled_backward")


@pytest.fixture(autouse=True)
def nothing_left_open(configured):
    yield
    torch.cuda.synchronize()
    torch.rand(1, device="cuda")  # raises where a capture was left open


def leaves(tensors):
    return tuple(x.detach().requires_grad_() for x in tensors)


@pytest.mark.parametrize("pass_", ["forward", "backward", "end_to_end"])
@pytest.mark.parametrize("name", NAMES)
def test_a_replay_computes_the_call_from_what_its_inputs_hold_now(name, pass_):
    q, k, v, do = inputs("bf16", *SIZES, device="cuda")
    forward = functools.partial(load_cells("flash").MAKE[name], is_causal=True)
    n_results = 1 if pass_ == "forward" else 3
    results = [torch.zeros_like(q, requires_grad=False) for _ in range(n_results)]

    def make(pass_=pass_, results=results, inputs=(q, k, v)):
        qkv = leaves(inputs)
        held = forward(*qkv) if pass_ == "backward" else None

        def call():
            o = forward(*qkv) if held is None else held
            new = [o]
            if pass_ != "forward":
                new = torch.autograd.grad(o, qkv, do, retain_graph=held is not None)
            with torch.no_grad():
                for result, x in zip(results, new, strict=True):
                    result.copy_(x)
            return new

        return call

    captured = CudaGraphs().capture(make, 2)
    with torch.no_grad():
        do.mul_(-0.5)
        if pass_ != "backward":  # which reads what its forward has saved, at these addresses
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
    for result in results:
        result.fill_(7)
    captured.replay()
    torch.cuda.synchronize()
    replayed = [result.clone() for result in results]
    captured.release()
    make()()
    torch.cuda.synchronize()
    for result, again in zip(results, replayed, strict=True):
        if name in SAME_BITS:
            assert torch.equal(result, again)
        else:
            torch.testing.assert_close(again, result, rtol=2e-2, atol=2e-2)


def test_a_replay_leaves_the_hosts_work_out():
    x = torch.randn(64, device="cuda")
    seconds = 0.02

    def slow_host():
        time.sleep(seconds)
        return x + 1

    called = time_many({"fn": slow_host}, rep_ms=100)["fn"]
    done = graphs.time_replays({"fn": lambda: slow_host}, {"fn": called.ms})
    assert called.ms_host >= 1000 * seconds > 2 * done["fn"].ms > 0


# In a process of its own, which is fit for nothing more then.
CANNOT = """
import torch
from a2lib.lab.failures import classify, is_lost
from a2lib.lab.graphs import NoGraph, time_replays

x = torch.randn(512, 512, device="cuda")
out, calls = torch.zeros_like(x), []
# PyTorch hands out 32 streams in turns: one of any two is not the one that is captured.
others = torch.cuda.Stream(), torch.cuda.Stream()

def synchronising():
    return x + x.sum().item()

def too_much():
    calls.append(1)
    if len(calls) <= 2:  # only the capture asks for it: what runs before must pass
        return x + 1
    return torch.empty(2**30, device="cuda"), torch.empty(2**50, device="cuda")

def elsewhere():  # which is not captured: a replay would seem to take no time at all
    with torch.cuda.stream(others[others[0] == torch.cuda.current_stream()]):
        torch.add(x, 1, out=out)
    return out

makers = {"first": lambda: lambda: x + 1, "bad": lambda: BAD}
try:
    time_replays(makers, dict.fromkeys(makers, 1.0))
except NoGraph as error:
    print(error.name, classify(error)[0], is_lost(error), error.columns, flush=True)
"""


@pytest.mark.parametrize(
    ("bad", "status"), [("synchronising", "error"), ("too_much", "oom"), ("elsewhere", "error")]
)
def test_what_cannot_be_captured_is_named_and_ends_its_process(bad, status, python):
    out, _ = python(CANNOT.replace("BAD", bad)).communicate()
    assert f"bad {status} True {{'note': 'no graph: " in out


def test_the_memory_of_graphs_is_given_back(no_garbage):
    x = torch.randn(2**24, device="cuda")
    make = functools.partial(lambda: lambda: (x * 2, x * 3))
    graphs.time_replays({"fn": make}, {"fn": 1.0})
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    graphs.time_replays({"fn": make}, {"fn": 1.0})
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after[0] <= before[0] and after[1] <= before[1]


def test_the_driver_tells_the_clock_and_the_power_or_nothing():
    sensors = Sensors()
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        x @ x
    mhz, watts = sensors.sm_mhz(), sensors.power_w()
    torch.cuda.synchronize()
    assert mhz is None or 100 < mhz < 10_000
    assert watts is None or 1 < watts < 10_000
    joules, limit = sensors.energy_j(), sensors.power_limit_w()
    assert limit is None or 1 < limit < 10_000
    end = time.monotonic() + 10  # the counter moves by itself
    while joules is not None and sensors.energy_j() == joules and time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
    assert joules is None or sensors.energy_j() > joules
