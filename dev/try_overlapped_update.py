"""Time a captured step whose update takes few multiprocessors beside its backward, one H200.

    python dev/try_overlapped_update.py [--models xl25,2.7B] [--limit 300]
    python dev/try_overlapped_update.py --device cpu --models tiny     # every path but the captures

Whole steps with 16-bit weights, captured once each in one process, replayed in turns:

- train-step, and the same without an update: their difference is what there is to hide;
- overlapped, with as many multiprocessors as the update gets, and with 16, 24, 32 and 48;
- the same by cuBLASLt, told in the backward that there are so many multiprocessors fewer, beside
  the train-step by cuBLASLt.

Prints for each the median, p20 and p80 of its milliseconds and of its ratio to the train-step of
the same round, and the share of the update that is hidden, against the train-step of the same
library. Then, from one state, whether a step leaves the weights and gradients that a train-step
leaves; the first line is two train-steps, which is the noise. What fails is told and ends that
model's captures; what was captured is timed. --limit ends it with what there is by then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from a2lib.benchmark.run import float32_products
from a2lib.benchmark.workload import Workload
from a2lib.experiments.benchmark.configurations import COMPARED, Configuration
from a2lib.experiments.data_parallel.turns import Mark
from a2lib.experiments.harness.process import environment
from a2lib.measure import Timing, synchronize
from a2lib.measure.graphs import CudaGraphs
from a2lib.theory.roofline import NARROW

WIDTHS = (16, 24, 32, 48)
ROUNDS, FEWEST = 12, 3
# Of a model's time: no capture, and no round, begins later.
CAPTURED, TIMED = 0.6, 0.85
# So small that hundreds of steps leave the weights, and with them the operands' digits, the same.
LR = 1e-6


@dataclass(frozen=True)
class Way:
    """``update``: after the backward, beside it, or none; ``told``: cuBLASLt, told of
    ``multiprocessors`` fewer in the backward."""

    update: str
    multiprocessors: int | None = None
    told: bool = False

    def __str__(self) -> str:
        words = {"after": "train-step", "none": "no update", "beside": "overlapped"}[self.update]
        if self.multiprocessors is not None:
            words += f", {self.multiprocessors} multiprocessors"
        return words + (", cuBLASLt" if self.told else "")


TRAIN, BARE, PLAIN = Way("after"), Way("none"), Way("after", told=True)
WAYS = [TRAIN, BARE, Way("beside"), *(Way("beside", n) for n in WIDTHS)]
WAYS += [PLAIN, *(Way("beside", n, told=True) for n in WIDTHS)]


@contextlib.contextmanager
def held(put: Callable, value: object, before: object):
    put(value)
    try:
        yield
    finally:
        put(before)


class Steps:
    """A model's steps, captured, and their times."""

    def __init__(self, model: str, device: str, graphs: CudaGraphs | None) -> None:
        self.device, self.graphs = device, graphs
        self.replays, self.times = {}, {}
        self.close = contextlib.ExitStack()
        # None of the graphs reads what another left: their memory may be the same.
        self.pool = torch.cuda.graph_pool_handle() if graphs else None
        way = ("flash", "blocks", True) if graphs else ("eager", "none", False)
        names = ("attention", "compile", "capture")
        configuration = Configuration(
            model, COMPARED[device], mode="overlapped-step", precision=NARROW,
            **dict(zip(names, way, strict=True)),
        )  # fmt: skip
        self.work = Workload(configuration.config(device), device)
        self.optimizer = self.work.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = LR
        self.said = str(configuration)

    @contextlib.contextmanager
    def _beside(self, way: Way):
        n = way.multiprocessors
        with contextlib.ExitStack() as stack:
            if way.told and self.graphs and n is not None:
                # One setting of the process, which backward's thread reads.
                stack.enter_context(held(torch._C._set_sm_carveout_experimental, n, None))
            if way.update == "beside":
                stack.enter_context(self.optimizer.overlapping(multiprocessors=n))
            yield

    def step(self, way: Way) -> torch.Tensor:
        self.work.beside_backward = partial(self._beside, way)
        self.work.optimizer = None if way.update == "none" else self.optimizer
        loss = self.work.work(lambda name: contextlib.nullcontext()).detach()
        self.work.drop_gradients()
        return loss

    def capture(self, way: Way) -> None:
        replay, library = partial(self.step, way), torch.backends.cuda.preferred_blas_library
        with contextlib.ExitStack() as stack:
            if way.told and self.graphs:
                stack.enter_context(held(library, "cublaslt", library()))
            self.step(way)  # compiles the update's kernels, loads the products'
            if self.graphs:
                with mock.patch.object(torch.cuda, "graph_pool_handle", lambda: self.pool):
                    captured = self.graphs.capture(lambda: replay, 0)
                replay = captured.replay
                self.close.callback(captured.release)
        self.replays[way], self.times[way] = replay, []

    def capture_all(self, until: float) -> None:
        for way in WAYS:
            begin = time.monotonic()
            if begin > until:
                print(f"no time for {way} and what follows it", flush=True)
                return
            try:
                self.capture(way)
            except Exception as error:
                print(f"{way}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
                if self.graphs:
                    self.graphs.mend()
                return
            print(f"{way}: captured in {time.monotonic() - begin:.1f} s", flush=True)

    def rounds(self, until: float) -> None:
        for replay in self.replays.values():  # not counted: clocks and caches
            replay()
        for turn in range(ROUNDS):
            if turn >= FEWEST and time.monotonic() > until:
                return
            # Each follows another one in every round, and the GPU never waits for the host.
            ways = random.Random(turn).sample(list(self.replays), len(self.replays))
            marks = [Mark(self.device)]
            for way in ways:
                self.replays[way]()
                marks.append(Mark(self.device))
            synchronize(self.device)
            for way, a, b in zip(ways, marks, marks[1:], strict=False):
                self.times[way].append(a.ms_until(b))

    def table(self) -> str:
        found = {way: times for way, times in self.times.items() if times}
        lines = [f"\n{self.said}: ms of a replay, in turns; ratio to the train-step of its round"]
        head = f"{'median':>9}{'p20':>9}{'p80':>9}{'n':>4}{'ratio':>9}{'p20':>8}{'p80':>8}"
        lines.append(f"{'way':42}{head}{'hidden':>8}")
        medians = {way: statistics.median(times) for way, times in found.items()}
        for way, times in found.items():
            own = Timing.of(times)
            ratio = Timing.of([a / b for a, b in zip(times, found[TRAIN], strict=True)])
            line = f"{way!s:42}{own.ms:9.3f}{own.ms_p20:9.3f}{own.ms_p80:9.3f}{own.n:4}"
            line += f"{ratio.ms:9.4f}{ratio.ms_p20:8.4f}{ratio.ms_p80:8.4f}"
            base = PLAIN if way.told else TRAIN
            if way.update == "beside" and BARE in found and base in found:
                update = medians[TRAIN] - medians[BARE]
                share = (medians[base] - medians[way]) / update if update > 0 else None
                line += f"{'-':>8}" if share is None else f"{share:8.0%}"
            lines.append(line)
        return "\n".join(lines)

    def check(self, until: float) -> None:
        masters = list(self.optimizer.masters().items())
        first = [self.optimizer.state[p]["exp_avg"] for p, _ in masters]
        saved = [master.clone() for _, master in masters]

        def after(way: Way) -> None:
            for (p, master), value in zip(masters, saved, strict=True):
                master.copy_(value)
                p.detach().copy_(value)
                for name in ("exp_avg", "exp_avg_sq", "normaliser"):
                    self.optimizer.state[p][name].zero_()
            self.replays[way]()
            synchronize(self.device)

        after(TRAIN)
        wanted = [master.detach().clone() for _, master in masters]
        moments = [x.clone() for x in first]
        moved = sum((a != b).sum().item() for a, b in zip(wanted, saved, strict=True))
        total = sum(x.numel() for x in wanted)
        print(f"one step from the same state moves {moved / total:.1%} of the weights; of these")
        for way in self.replays:
            if way == BARE:
                continue
            if time.monotonic() > until:
                print("no time for the others")
                return
            after(way)
            other = sum((m != x).sum().item() for (_, m), x in zip(masters, wanted, strict=True))
            far = max(
                ((x - y).norm() / y.norm().clamp(min=1e-30)).item()
                for x, y in zip(first, moments, strict=True)
            )
            print(f"  {way!s:42}{other / max(moved, 1):9.3%} differ; gradients by at most "
                  f"{far:.1e} of a parameter's norm", flush=True)  # fmt: skip


def trial(model: str, device: str, graphs: CudaGraphs | None, limit: float) -> None:
    begin = time.monotonic()
    steps = Steps(model, device, graphs)
    print(f"\n{steps.said}", flush=True)
    try:
        for _ in range(2):
            steps.step(TRAIN)
        synchronize(device)
        print(f"two steps launched: {time.monotonic() - begin:.1f} s", flush=True)
        steps.capture_all(begin + CAPTURED * limit)
        steps.rounds(begin + TIMED * limit)
    finally:
        if steps.times.get(TRAIN):
            print(steps.table(), flush=True)
    # Last, since it needs memory: an error here loses nothing.
    if steps.times.get(TRAIN):
        steps.check(begin + limit)
    steps.close.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="xl25,2.7B")
    parser.add_argument("--limit", type=float, default=300, help="seconds, for all models")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What the benchmark's workers have compiled is found again.
    os.environ.update(environment())
    graphs = CudaGraphs(priority=-1) if given.device == "cuda" else None
    models = given.models.split(",")
    with float32_products(NARROW), graphs.on_stream() if graphs else contextlib.nullcontext():
        print(torch.cuda.get_device_name() if graphs else "cpu", "torch", torch.__version__)
        for i, model in enumerate(models):
            try:
                trial(model, given.device, graphs, (end - time.monotonic()) / (len(models) - i))
            except RuntimeError as error:
                print(f"{model}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
            except KeyboardInterrupt:
                return
            gc.collect()
            torch._dynamo.reset()
            if graphs:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
