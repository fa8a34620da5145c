"""Our attention one technique at a time, from a Triton kernel as a tutorial has it to the library.

    every_tile      plain Triton, a mask in every tile, all tiles visited, tiles of a tutorial
    to_diagonal     no tile above the diagonal
    two_loops       those below it in a loop of their own, unmasked, whose loads are pipelined
    tuned_tiles     tiles chosen by measurement
    one_consumer    forward for Hopper: one warp loads by TMA, one group of warps multiplies
    consumers       two or three groups, one's exponentials beside another's products
    one_sweep       backward for Hopper: five products a tile for seven, dQ added up across programs
    heads_in_l2     of both: as many heads at a time as the L2 cache holds
    key_chunks      forward of few tiles: programs share the keys of a query
    query_chunks    backward of few tiles: programs share the queries of a key (of few tokens: one
                    launch): the library

A rung is the library with the techniques of the rungs after it taken away, by way of its tables and
of what chooses a form (``_swaps``): no kernel is another than the library's, but for the masks of
the lowest two (``naive_masks``). Forward, and forward and backward, all rungs in turns. ``ms`` and
its quantiles are the GPU's own time, replayed from a CUDA graph; on a CPU that of one call. Each is
checked against float64 before.

A row names the GPU it is of by a hash: another machine's rows stand beside them.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Parameters, Shape, sweep_shapes
from a2lib.experiments.flash.turns import Turns
from a2lib.experiments.harness import Job, Row, Task
from a2lib.experiments.harness.ahead import Compilation
from a2lib.experiments.passes import one_pass
from a2lib.lab import FLASH_LADDER, Timing, failures, graphs, synchronize
from a2lib.lab.clock import Clock
from a2lib.lab.device import gpu_hash

PEERS = ("sdpa_flash", "sdpa_cudnn")
RUNGS = (
    *("every_tile", "to_diagonal", "two_loops", "tuned_tiles", "one_consumer", "consumers"),
    *("one_sweep", "heads_in_l2", "key_chunks", "query_chunks"),
)
HOPPER = ("one_consumer", "consumers", "one_sweep", "heads_in_l2")
PASSES = ("forward", "end_to_end")
COMPILE = "a2lib.experiments.flash.ladder:compile_rung"
# Of Triton 3.6's tutorial 06 (its forward is tuned among several, of which this is one), but that
# its backward's two kernels are one: queries, keys, warps, stages.
TUTORIAL = {"forward": (128, 128, 8, 2), "backward_dq": (128, 32, 4, 5),
            "backward_dkdv": (32, 128, 4, 5)}  # fmt: skip


def prepare() -> None:
    """As the other tables; without a GPU Triton interprets, which has to be said before its
    import."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    peers.configure()


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each shape; [] for a sweep without the ladder."""
    if not given.has("ladder") or given.implementations != "auto":
        return []
    gpu, made = gpu_hash(), []
    for shape in sweep_shapes("ladder", tiny=device == "cpu"):
        sizes = dataclasses.asdict(shape)
        rows = {
            rung: tuple({"rung": rung, **sizes, "pass": pass_, "gpu": gpu} for pass_ in PASSES)
            for rung in (*PEERS, *RUNGS)
        }
        made.append(Task(str(shape), {"shape": sizes}, rows, in_turns=True))
    return made


def compilations(pending: list[Task]) -> list[Compilation]:
    """What ``pending`` needs compiled: the same kernel may be asked for twice, which costs less
    than to know."""
    made = []
    for task in pending:
        needed = 16 * Shape(**task.spec["shape"]).tensor_bytes
        for rung in task.rows:
            if rung in RUNGS:
                spec = {**task.spec, "rung": rung}
                made.append(Compilation(f"{rung} {task.label}", spec, needed))
    return made


def measure(job: Job) -> None:
    """The rungs of one shape, in turns or each alone; what fails is a row.

    Raises failures.LostContext, after the rows, where the device has to be reset.
    """
    _Rungs(job, Shape(**job.spec["shape"])).run()


class _Rungs(Turns):
    section, passes = FLASH_LADDER, PASSES

    def prepare(self, name: str) -> None:
        with Rung(name, self.shape, self.device) as rung:
            self.expected.check(rung.forward, self.qkv)
        self.forwards[name] = rung

    def call(self, name: str, pass_: str, *, anew: bool = False) -> Callable[[], object]:
        return self.forwards[name].call(self.qkv, self.do, pass_, anew)

    def timed(self, makers: Mapping[str, Callable]) -> tuple[dict[str, Row | Exception], bool]:
        """By one call each, which on a GPU says how often to replay it."""
        clock, once = Clock(self.device), {}
        for name, make in makers.items():
            try:
                once[name] = Timing.from_samples(clock.samples(make(), 1))
            except Exception as error:
                once[name] = failures.detached(error)
        found = graphs.Replays(once)
        if self.device == "cuda":
            expected = {n: one.ms for n, one in once.items() if isinstance(one, Timing)}
            anew = {name: partial(makers[name], anew=True) for name in expected}
            found = graphs.time_replays(anew, expected)
        failed = {name: one for name, one in once.items() if isinstance(one, Exception)}
        rows = {
            name: one if isinstance(one, Exception) else one.row(FLASH_LADDER)
            for name, one in (failed | found.results).items()
        }
        return rows, found.usable


def compile_rung(job: Job) -> None:
    """Run one rung forward and backward, so that its code is in the caches on disk."""
    shape = Shape(**job.spec["shape"])
    *qkv, do = peers.inputs(shape, job.device, job.seed)
    Rung(job.spec["rung"], shape, job.device).call(qkv, do, "end_to_end")()
    synchronize(job.device)


class Rung:
    """A rung at one shape. Within ``with rung`` the library is as high as it; it keeps what it has
    compiled, and others theirs."""

    def __init__(self, name: str, shape: Shape, device: str) -> None:
        self.forward = peers.build(name if name in PEERS else "a2lib", shape, device)
        if name in PEERS:
            peers.check(name, device)
        self.swaps = [] if name in PEERS else _swaps(name, device)

    def __enter__(self) -> Self:
        self.kept = [getattr(module, name) for module, name, _ in self.swaps]
        for swap in self.swaps:
            setattr(*swap)
        return self

    def __exit__(self, *_) -> None:
        for (module, name, _), value in zip(self.swaps, self.kept, strict=True):
            setattr(module, name, value)

    def call(self, qkv, do, pass_: str, anew: bool = False) -> Callable[[], object]:
        """The pass as a call, as ``passes.one_pass``."""
        inner = one_pass(self.forward, qkv, do, pass_, anew=anew)

        def call():
            with self:
                return inner()

        return call


def _swaps(rung: str, device: str) -> list[tuple[object, str, object]]:
    """(module, name, value) of all that is other than in the library; of two for one name the
    second counts. Raises NotImplementedError for what this GPU has no kernels for."""
    import torch

    from a2lib.attention import hopper, launch, passes, plans, tiles

    if rung in HOPPER and not hopper._is_hopper(torch.device(device)):
        raise NotImplementedError("its kernels need a GPU of compute capability 9.0")

    def masks(every):
        # Imports Triton.
        from a2lib.experiments.flash.naive_masks import kernel

        return lambda name: kernel(name, every)

    def none(*_):
        return 0

    plain = {
        key: (tiles.Tile(*TUTORIAL[key[0]]), *others[1:])
        for key, others in tiles.TILES.items()
        if key[0] in TUTORIAL
    }
    off = {
        "query_chunks": [(passes, "in_chunks", none), (passes, "in_one_launch", none)],
        "key_chunks": [(passes, "keys_per_chunk", none)],
        "heads_in_l2": [(hopper, "_together", lambda bytes_per_head, n_heads, *_: n_heads)],
        "one_sweep": [(hopper, "serves_backward", none)],
        "consumers": [(hopper, "hopper_forward", lambda *_: (1, False))],
        "one_consumer": [(hopper, "serves_forward", none)],
        "tuned_tiles": [(passes, name, {}) for name in ("WHEN_FEW", "WHEN_SHORT")]
        + [(passes, "TILES", plain)],
        "two_loops": [(passes, "_kernel", masks(False))],
        "to_diagonal": [(passes, "_kernel", masks(True))],
    }
    above = RUNGS[: RUNGS.index(rung) : -1]
    own = [(plans, "_plans", {}), (launch, "_compiled", {})]
    return own + [swap for name in above for swap in off[name]]
