"""Measure the implementations at one shape, in one process: every outcome is a row.

Order, and why. Each implementation is first run once forward and once backward and checked against
float64 (a wrong result is an `error` row, never a time), then its peak memory is read around single
calls. Timing comes last and pass by pass: all forwards in turns, then all backwards, then end to
end, so that a drifting clock reaches all peers alike. A pass that needs more than ``SHARE`` of the
memory is timed on its own instead: the caching allocator would otherwise give its blocks back and
fetch them again on every turn, inside the timed region.

Each pass is timed three ways: called by the host (``ms``), the host's own time for that
(``ms_host``), and the same kernels replayed from a CUDA graph, where the host has no part
(``ms_graph``). A call that cannot be captured has no ``ms_graph`` and says why in its note. What
can be compiled ahead of that, in other processes, is ``compilations``.

forward is that of training: it saves what the backward needs. backward is
``torch.autograd.grad(o, (q, k, v), do, retain_graph=True)`` on one graph made outside the timing.
end_to_end is both.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial

from a2lib.experiments.flash import peers, sanity
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.flash.turns import Turns, tried
from a2lib.experiments.harness.ahead import Compilation
from a2lib.experiments.harness.worker import Job, free_memory
from a2lib.experiments.passes import one_pass
from a2lib.lab import FLASH, memory, peak_bytes, synchronize
from a2lib.theory.attention import PASSES

SHARE = 0.04
COMPILED = ("a2lib", *peers.COMPILED)
COMPILE = "a2lib.experiments.flash.comparison:compile_one"

prepare = peers.configure


def compilations(pending: Mapping[Shape, Iterable[str]]) -> list[Compilation]:
    """What ``pending`` (the implementations still to measure at each shape) needs compiled, forward
    and backward.

    Our own kernels take their lengths at run time: they are compiled per head size, dtype and mask,
    and again where a size is 1, which Triton folds into the code.
    """
    found: dict[tuple, Compilation] = {}
    for shape, implementations in pending.items():
        for name in implementations:
            same = (shape.dtype, shape.head_dim, shape.causal, shape.batch == 1, shape.heads == 1)
            code = same if name == "a2lib" else shape
            if name in COMPILED:
                spec = {"shape": dataclasses.asdict(shape), "implementation": name}
                mask = shape.seq_len**2 * 4 if name == "flex" else 0
                needed = 8 * shape.tensor_bytes + peers.needed_bytes(name, shape, "end_to_end")
                one = Compilation(f"{name} {shape}", spec, needed + mask)
                found.setdefault((name, code), one)
    return list(found.values())


def compile_one(job: Job) -> None:
    """Run one implementation forward and backward, so that its code is in the caches on disk.
    Measuring meets the same error as this, and makes a row of it."""
    import torch

    shape = Shape(**job.spec["shape"])
    torch._dynamo.reset()
    *qkv, do = peers.inputs(shape, job.device, job.seed)
    forward = peers.build(job.spec["implementation"], shape, job.device)
    one_pass(forward, qkv, do, "end_to_end")()
    synchronize(job.device)


def measure(job: Job) -> None:
    """The implementations at one shape. Raises failures.LostContext, its row stored, where the
    device has to be reset."""
    comparison = Comparison(job, Shape(**job.spec["shape"]))
    comparison.reset()
    comparison.names = [name for name in comparison.names if not comparison.ruled_out(name)]
    comparison.run()
    comparison.reset()


class Comparison(Turns):
    """The wanted passes of each implementation at one shape, in turns or each timed alone."""

    section, passes = FLASH, PASSES

    def ruled_out(self, name: str) -> bool:
        """Store the rows that need no trial; whether no pass is left to try."""
        if failed := tried(partial(peers.check, name, self.device)):
            self.fail(name, failed)
        for pass_ in self.passes_of(name):
            needed = peers.host_bytes(name, self.shape, pass_)
            if self.job.would_swap(needed, [self.left[name, pass_]]):
                del self.left[name, pass_]
        return not self.passes_of(name)

    def prepare(self, name: str) -> None:
        """Build, check, and read the peak memory of one implementation."""
        forward = peers.build(name, self.shape, self.device)
        o = forward(*self.qkv)
        self.expected.check_output(o.detach())
        self.forwards[name], held = forward, [o]
        del o
        with_grad = [pass_ for pass_ in self.passes_of(name) if pass_ != "forward"]
        if with_grad and (failed := tried(partial(self._check_gradients, name, held))):
            self.fail(name, failed, with_grad)
        held.clear()
        for pass_ in self.passes_of(name) if self.device == "cuda" else ():
            if failed := tried(partial(self._read_peak, name, pass_)):
                self.fail(name, failed, [pass_])

    def _check_gradients(self, name: str, held: list) -> None:
        """Of the output that is ``held``, and let go of with its graph."""
        import torch

        self.expected.check_gradients(*torch.autograd.grad(held.pop(), self.qkv, self.expected.do))
        gradients = self.call(name, "end_to_end")()
        for which, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            sanity.check_finite(which, gradient)

    def _read_peak(self, name: str, pass_: str) -> None:
        self.known[name, pass_] = {"peak_bytes": peak_bytes(self.call(name, pass_))}

    def groups(self, names: list[str], pass_: str) -> list[list[str]]:
        together = [n for n in names if self.job.in_turns and not self._is_large(n, pass_)]
        alone = [[name] for name in names if name not in together]
        return [together, *alone] if together else alone

    def time(self, names: list[str], pass_: str) -> None:
        if len(names) == 1:
            free_memory(self.device)
        super().time(names, pass_)
        if len(names) == 1:
            free_memory(self.device)

    def _is_large(self, name: str, pass_: str) -> bool:
        # A held graph keeps about what a forward leaves behind, which end_to_end's estimate bounds.
        peak = self.known.get((name, pass_), {}).get("peak_bytes")
        needed = peak or peers.needed_bytes(name, self.shape, pass_)
        if pass_ == "backward":
            needed = max(needed, peers.needed_bytes(name, self.shape, "end_to_end"))
        return needed > SHARE * memory.total_bytes(self.device)

    def reset(self) -> None:
        """Forget compiled code and tensors: Dynamo compiles a limited number of shapes."""
        import torch

        self.forwards.clear()
        self.qkv = self.do = self.expected = None
        if any(name in peers.COMPILED for name in self.job.wanted):
            torch._dynamo.reset()
        free_memory(self.device)
