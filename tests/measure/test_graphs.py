"""Replays in turns, and what a failed capture leaves: on stand-ins for CUDA, whose test is
tests/gpu/test_timing.py."""

import contextlib
import gc
import types
import weakref

import pytest
import torch

from a2lib.measure import Timing, graphs
from a2lib.measure.graphs import CudaGraphs, Unusable


class FakeClock:
    """A replay is a callable that returns how many milliseconds it took."""

    sm_mhz = None

    def __init__(self):
        self.log = []
        self.released = 0

    def samples(self, fn, n):
        self.log.append((fn.name, n))
        return [fn() for _ in range(n)]

    def release(self):
        self.released += 1


class FakeGraphs:
    def __init__(self, unusable=False):
        self.log, self.unusable, self.alive = [], unusable, set()

    def capture(self, make, calls):
        call = make()
        self.log.append((call.name, calls))
        for _ in range(calls + 1):
            call()
        self.alive.add(call.name)
        return types.SimpleNamespace(replay=call, release=lambda: self.alive.discard(call.name))

    def mend(self):
        self.log.append("mend")
        if self.unusable:
            raise Unusable("gone")


def maker(name, *results):
    """A maker of a call that gives these milliseconds, or raises them, the last from there on."""

    def make():
        left = list(results)

        def call():
            result = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(result, Exception):
                raise result
            return result

        call.name = name
        return call

    return make


def measure(*makers, due=20, expected=1.0, unusable=False):
    made = {make().name: make for make in makers}
    fake, clock = FakeGraphs(unusable), FakeClock()
    expected_ms = dict.fromkeys(made, expected)
    bounds = {"min_n": due, "max_n": due, "graphs": fake, "clock": clock}
    done = graphs.time_replays(made, expected_ms, **bounds)
    assert not fake.alive and clock.released
    return done, fake, clock


def test_all_are_captured_and_then_replayed_in_turns():
    done, fake, clock = measure(maker("a", 1.0), maker("b", 2.0))
    assert done.usable and list(done.results) == ["a", "b"]
    assert done.results == {"a": Timing(1.0, 1.0, 1.0, 20), "b": Timing(2.0, 2.0, 2.0, 20)}
    assert fake.log == [("a", 2), ("b", 2)]
    assert clock.log == [("a", 2), ("b", 2)] * 10
    # A long call is run once before its capture.
    assert measure(maker("a", 1.0), expected=graphs.SHORT_MS)[1].log == [("a", 1)]


def test_as_many_samples_are_taken_as_fit():
    times = {"short": 0.01, "middle": 10.0, "long": 3000.0}
    made = {name: maker(name, 1.0) for name in times}
    done = graphs.time_replays(made, times, graphs=FakeGraphs(), clock=FakeClock())
    assert {name: timing.n for name, timing in done.results.items()} == {
        "short": graphs.MAX_N,
        "middle": graphs.REP_MS / 10,
        "long": graphs.MIN_N,
    }


@pytest.mark.parametrize("at", [0, 2, 3, 10])
def test_a_failure_is_its_own_and_the_rest_go_on(at):
    error = MemoryError("out of memory")
    done, fake, _ = measure(maker("a", 1.0), maker("b", *[2.0] * at, error), maker("c", 3.0))
    assert done.usable and done.results["b"] is error and error.__traceback__ is None
    assert done.results["a"].n == done.results["c"].n == 20
    assert fake.log.count("mend") == 1


@pytest.mark.parametrize("at", [0, 3])
def test_an_unusable_device_ends_it_and_names_the_culprit_alone(at):
    error = RuntimeError("illegal memory access")
    makers = maker("a", 1.0), maker("b", *[2.0] * at, error), maker("c", 3.0)
    done, _, _ = measure(*makers, unusable=True)
    assert not done.usable and list(done.results) == ["b"]


class FakeCuda:
    """What CudaGraphs uses of torch.cuda: a capture records, a replay runs what was recorded."""

    def __init__(self, end=None):
        self.end = end
        self.current, self.log = "default", []

    def replay(self):
        pass

    def current_stream(self):
        return self.current

    def synchronize(self):
        self.log.append("synchronize")

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self):
        return (0, 1)

    def CUDAGraph(self):
        def pool():
            if not graph.ended:
                raise RuntimeError("without a preceding successful capture")

        def reset():
            self.log.append("reset")

        graph = types.SimpleNamespace(ended=False, pool=pool, reset=reset, replay=self.replay)
        return graph

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert pool == (0, 1) and self.current == "side" and not gc.isenabled()
        try:
            yield
        finally:
            if self.end:
                self.current = "side"  # as torch.cuda.graph leaves it
                raise self.end
            graph.ended = True


@pytest.fixture
def cuda_graphs():
    def make(**how):
        made = CudaGraphs.__new__(CudaGraphs)
        made._cuda = FakeCuda(**how)
        ended = made._cuda.log
        allocator = types.SimpleNamespace(
            _cuda_endAllocateToPool=lambda device, pool: ended.append(("end", device, pool)),
            _cuda_releasePool=lambda device, pool: ended.append(("release", device, pool)),
        )
        made._torch = types.SimpleNamespace(_C=allocator, Tensor=torch.Tensor)
        made._device, made._error_mode = 3, "global"
        made._stream = types.SimpleNamespace(
            name="side",
            wait_stream=lambda other: None,
            synchronize=lambda: made._cuda.log.append("replayed"),
        )
        return made

    yield make
    assert gc.isenabled()


def test_the_call_is_made_run_and_captured_on_one_stream(cuda_graphs):
    made, seen = cuda_graphs(), []
    # The inputs were written on the caller's stream.
    made._stream.wait_stream = lambda other: seen.append(("waits for", other))

    def make():
        seen.append(made._cuda.current)
        return lambda: seen.append(made._cuda.current)

    captured = made.capture(make, 2)
    assert seen == [("waits for", "default"), *["side"] * 4] and made._cuda.current == "default"
    captured.release()
    # What a first replay writes is there before anything is read on another stream.
    assert made._cuda.log == ["replayed", "reset"]


CANNOT_END = RuntimeError("failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("end", "given_back"),
    [(None, ["reset"]), (CANNOT_END, [("end", 3, (0, 1)), ("release", 3, (0, 1))])],
)
def test_a_failed_capture_names_the_first_error_and_lets_go_of_all(cuda_graphs, end, given_back):
    """A graph of autograd that lives on hands later gradients over on the capture's stream."""
    made, held = cuda_graphs(end=end), []

    def call():
        loss = torch.zeros(1)
        held.append(weakref.ref(loss))
        if len(held) > 1:
            raise RuntimeError("not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted") as failed:
        made.capture(lambda: call, 1)
    assert [loss() for loss in held] == [None, None] and failed.tb is not None
    assert made._cuda.log == given_back and made._cuda.current == "default"
    if end:
        with pytest.raises(RuntimeError, match="previous error"):
            made.capture(lambda: lambda: None, 0)


@pytest.mark.parametrize("written", [True, False])
def test_a_replay_that_leaves_an_output_unwritten_is_no_graph(cuda_graphs, written):
    made = cuda_graphs()
    one, two = torch.zeros(2, requires_grad=True), torch.zeros(3)
    replays = []

    def replay():
        replays.append([one.isnan().all().item(), two.isnan().all().item()])
        with torch.no_grad():
            one.fill_(1.0)
            two[: 3 if written else 2] = 2.0

    made._cuda.replay = replay
    whole = torch.zeros(1, dtype=torch.int32)
    refused = pytest.raises(RuntimeError, match="does not write all of its outputs")
    with contextlib.nullcontext() if written else refused:
        made.capture(lambda: lambda: (one, two, None, whole), 1)
    assert replays == [[True, True]]


@pytest.mark.parametrize(
    ("broken", "end", "reason"),
    [
        ({}, None, None),
        ({"zeros": lambda n, device: torch.ones(n)}, None, "wrong sum"),
        ({"rand": None}, None, "not callable"),
        ({}, CANNOT_END, "previous error"),
    ],
)
def test_mending_tries_a_capture_and_a_random_number(cuda_graphs, broken, end, reason):
    # The stand-in runs the call where CUDA would record it, and replays nothing: as many additions.
    made, drawn = cuda_graphs(end=end), []
    work = {"zeros": lambda n, device: torch.zeros(n), "rand": lambda n, device: drawn.append(n)}
    vars(made._torch).update(work | broken)
    with pytest.raises(Unusable, match=reason) if reason else contextlib.nullcontext():
        made.mend()
    assert reason or drawn == [1]


def test_a_first_replay_may_be_timed_on_the_stream_of_the_capture(cuda_graphs):
    made, seen = cuda_graphs(), []
    loss = torch.zeros(1)
    made._cuda.replay = lambda: loss.fill_(1.0)

    def first_replay(replay):
        seen.append((made._cuda.current, loss.isnan().item()))
        replay()

    with made.on_stream():
        assert made._cuda.current == "side"
        made.capture(lambda: lambda: loss, 0, first_replay)
    assert seen == [("side", True)] and made._cuda.current == "default"
    with pytest.raises(RuntimeError, match="does not write all of its outputs"):
        made.capture(lambda: lambda: loss, 0, lambda replay: None)
