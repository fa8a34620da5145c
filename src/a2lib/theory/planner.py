"""The 4D layout that trains a Transformer fastest on at most N devices, by search.

Every size that keeps the rules of layouts.py is tried, with every number of micro-batches, of
devices for experts, every sharding and strategy of checkpointing, but for what takes longer than
the best found by its arithmetic, its bubble and the messages that it waits for alone. Where that is
more than can be tried in seconds, every other size is left out until it is not, and the search ends
after MOST_COUNTED layouts: ``Plan.tried`` says so. What a plan rests on is ``layouts.ASSUMPTIONS``.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, lru_cache

from a2lib.theory import layouts
from a2lib.theory.layout_time import least_waited, stage_flops, waiting
from a2lib.theory.layouts import Job, Layout, Plan, memory
from a2lib.theory.other_axes import least_microbatches
from a2lib.theory.products import check_name, largest
from a2lib.theory.stages import stage_blocks, stages

# Sizes with many divisors have billions of layouts. So many meshes, and so many layouts of which
# the memory is counted, are seconds of a search, and so many of one mesh are enough. To count the
# time too is as long as TIMED.
MOST_MESHES, MOST_COUNTED, MOST_OF_MESH = 50_000, 31_250, 6_250
TIMED = 8
LARGEST = 2**40


def search(
    job: Job,
    fixed: dict[str, int | str] | None = None,
    *,
    hidden: str | float = "data",
    across: bool = False,
) -> Plan:
    """The plan of the shortest step that fits; ``fixed`` holds fields of ``Layout`` to a value.

    The step is that of ``Plan.seconds(hidden)``; of equal ones (to six figures) the shorter with
    nothing hidden, with all, then the one of least memory. Tensor parallelism stays within a node
    unless it is fixed or may go ``across``; a zero-bubble pipeline is one that is fixed. Raises
    ValueError, in one line, for a fixed value that breaks a rule, for another ``hidden``, and where
    nothing fits.
    """
    if hidden not in layouts.HIDDEN and (isinstance(hidden, str) or not 0 <= hidden <= 1):
        names = ", ".join(layouts.HIDDEN)
        raise ValueError(f"hidden {hidden!r}: allowed are {names}, numbers from 0 to 1")
    fixed = fixed or {}
    allowed = [field.name for field in fields(Layout)]
    for name in fixed:
        check_name("fixed", name, allowed)
    # With 1 for what is free, so it refuses what no search can mend; these need others' sizes.
    late = ("chunks", "expert", "schedule")
    layouts.check(job, Layout(**{name: value for name, value in fixed.items() if name not in late}))
    check_name("schedule", fixed.get("schedule", "1f1b"), layouts.SCHEDULES)
    best = key = None
    least, counted = math.inf, 0
    meshes, tried = _meshes(job, fixed, across)
    for at_least, seconds, mesh in _by_time(job, fixed, meshes, hidden):
        if key is not None and at_least > key[0] * (1 + 1e-5):
            break
        # If what takes least of this mesh does not fit, nothing does.
        some = [(layout, *memory(job, layout)) for layout in _least_memory(job, fixed, mesh)]
        counted += len(some)
        smallest = min((sum(held.values()) for _, _, held in some), default=math.inf)
        least = min(least, smallest)
        if counted > MOST_COUNTED:
            tried = False
            break
        if smallest > job.memory:
            continue

        def slower(layout: Layout, seconds: dict[str, float] = seconds) -> bool:
            bubble = (layout.pipeline - 1) / layout.microbatches * waiting(job, layout)
            least_s = (1 + bubble) * seconds[layout.checkpointing]
            return key is not None and least_s > key[0] * (1 + 1e-5)  # noqa: B023

        every, all_of_it = _layouts(job, fixed, mesh, slower)
        tried = tried and all_of_it
        for layout in every:
            counted += 1
            moment, held = memory(job, layout)
            if sum(held.values()) > job.memory:
                continue
            counted += TIMED
            plan = layouts.timed(job, layout, moment, held)
            this = _rank(plan, hidden)
            if key is None or this < key:
                best, key = plan, this
    if best is None and not tried:
        raise ValueError(
            f"none of the layouts tried fits, and more keep the rules than can be "
            f"tried; hold one or more of {', '.join(allowed)}"
        )
    if best is None and least == math.inf:
        held = ", ".join(f"{name} {value}" for name, value in fixed.items())
        raise ValueError(
            f"no layout of at most {job.devices} devices keeps the rules with {held}; free one"
        )
    if best is None:
        raise ValueError(
            f"no layout of at most {job.devices} devices fits: the least takes "
            f"{least / 1e9:.1f} GB of the {job.memory / 1e9:.1f} GB allowed on each"
        )
    return replace(best, tried=tried)


def largest_batch(job: Job, layout: Layout) -> int:
    """The most sequences of a step that fit on a layout of this ``data`` and ``microbatches``, 0 if
    one for each of these does not. Raises ValueError as ``evaluate``, for the job's own batch."""
    layouts.check(job, layout)
    unit = layout.data * layout.microbatches

    def fits(k: int) -> bool:
        _, held = memory(replace(job, batch=k * unit), layout)
        return sum(held.values()) <= job.memory

    return unit * largest(fits)


def _by_time(job: Job, fixed: dict, meshes: list, hidden: str | float) -> list[tuple]:
    """Meshes with the least seconds of a step, and with those without a bubble by strategy of
    checkpointing, the quickest first."""
    found = []
    # Of what is waited for where nothing hides, so much is left.
    exposed = {"data": 1, "none": 1, "all": 0}[hidden] if isinstance(hidden, str) else 1 - hidden
    names = _values(fixed, "checkpointing", _strategies(job))
    (whole,) = stages(job, Layout())
    flops = {name: stage_flops(job, job.batch * job.context, whole, name) for name in names}

    @cache
    def waited(tensor: int, context: int, within: bool, name: str) -> tuple[float, float]:
        outside = 1 if within else job.device.node + 1
        sequence = fixed.get("sequence", True)
        layout = Layout(outside, tensor, 1, context, checkpointing=name, sequence=sequence)
        return least_waited(job, layout)

    for mesh in meshes:
        data, tensor, p, context = mesh
        devices, seconds = math.prod(mesh), {}
        rows, blocks = job.batch * job.context / (data * context), job.shape.num_layers / p
        for name, operations in flops.items():
            seconds[name] = operations / (job.flops * devices)
            if exposed:
                token, once = waited(tensor, context, devices <= job.device.node, name)
                seconds[name] += exposed * blocks * (rows * token + once)
        most = job.batch // data * -(-job.shape.num_layers // p)  # of micro-batches and of pieces
        bubble = (p - 1) / most if fixed.get("schedule", "1f1b") == "1f1b" else 0
        found.append(((1 + bubble) * min(seconds.values()), seconds, mesh))
    return sorted(found, key=lambda one: one[0])


def _rank(plan: Plan, hidden: str | float) -> tuple[float, ...]:
    """What the search makes small, in turn; rounded, so that equal sums are equal."""
    steps = (plan.seconds(hidden), plan.serial_s, plan.step_s)
    return tuple(float(f"{number:.6g}") for number in (*steps, plan.memory_bytes))


def _thinned(most: int, *lists: list) -> tuple[list[list], bool]:
    """The lists without every other value of the longest, and again, until so many combinations or
    fewer are left; the ends stay. And whether nothing had to go."""
    found = [list(one) for one in lists]
    while math.prod(map(len, found)) > most and len(longest := max(found, key=len)) > 2:
        longest[1:-1] = longest[2:-1:2]
    return found, list(map(list, lists)) == found


@lru_cache(maxsize=4096)
def _divisors(n: int) -> list[int]:
    if n > LARGEST:  # some 2**20 divisions
        raise ValueError(f"{n} is above {LARGEST:,}, the largest size that a search takes apart")
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def _sizes(job: Job, axis: str, across: bool) -> list[int]:
    """All sizes of an axis that keep its rules, and of tensor those within a node."""
    layers = job.shape.num_layers
    cut = [math.gcd(*layouts.cut_by_axis(job)[axis].values())]
    wholes = range(layers, layers + 4) if axis == "pipeline" else cut
    most = job.devices if axis != "tensor" or across else min(job.devices, job.device.node)
    found = {k for n in wholes for k in _divisors(n) if k <= most}
    return sorted(k for k in found if not any(layouts.of_axis(job, axis, k)))


def _meshes(
    job: Job, fixed: dict, across: bool = False
) -> tuple[list[tuple[int, int, int, int]], bool]:
    """Sizes of the four axes, and whether those are all."""
    lists = [[fixed[axis]] if axis in fixed else _sizes(job, axis, across) for axis in layouts.AXES]
    if fixed.get("schedule", "1f1b") != "1f1b":
        lists[2] = [p for p in lists[2] if p > 1]
    most, tried = 8 * MOST_MESHES, True
    while True:
        lists, all_of_them = _thinned(most, *lists)
        tried = tried and all_of_them
        data, tensor, pipeline, context = lists
        ranks = {
            (t, p, c): bisect.bisect_right(data, job.devices // (t * p * c))
            for t, p, c in itertools.product(tensor, pipeline, context)
        }
        if sum(ranks.values()) <= MOST_MESHES:
            break
        most //= 2
    return [(d, *others) for others, n in ranks.items() for d in data[:n]], tried


def _layouts(
    job: Job, fixed: dict, mesh: tuple[int, ...], slower: Callable[[Layout], bool] | None = None
) -> tuple[Iterator[Layout], bool]:
    """The layouts of one mesh, without those that are ``slower`` however their state and experts
    are cut, and whether those are all."""
    shardings = _values(fixed, "sharding", layouts.SHARDINGS)
    strategies = _values(fixed, "checkpointing", _strategies(job))
    counts, pieces = _microbatches(job, fixed, mesh), _chunks(job, fixed, mesh[2], mesh[2])
    several = len(shardings) * len(strategies) * max(1, len(pieces))
    (counts, experts), tried = _thinned(
        max(1, MOST_OF_MESH // several), counts, _experts(job, fixed, mesh)
    )
    found = (
        _layout(fixed, mesh, m, sharding, strategy, chunks, expert)
        for m in counts
        for strategy, chunks in itertools.product(strategies, _chunks(job, fixed, mesh[2], m))
        if not slower or not slower(_layout(fixed, mesh, m, "zero1", strategy, chunks, 1))
        for sharding, expert in itertools.product(shardings, experts)
        if expert == 1 or sharding != "hsdp"
    )
    return found, tried


def _layout(fixed: dict, mesh: tuple, m: int, sharding: str, strategy: str, *cuts: int) -> Layout:
    chunks, expert = cuts
    sequence, schedule = fixed.get("sequence", True), fixed.get("schedule", "1f1b")
    return Layout(*mesh, m, sharding, strategy, chunks, sequence, expert, schedule)


def _values(fixed: dict, name: str, free: tuple) -> tuple:
    return (fixed[name],) if name in fixed else free


def _strategies(job: Job) -> tuple[str, ...]:
    # flash keeps no scores
    return layouts.STRATEGIES if job.attention == "eager" else ("none", "block")


def _chunks(job: Job, fixed: dict, stages: int, microbatches: int) -> list[int]:
    """Pieces of the model on a device, the most first, which wait least."""
    found = [1]
    if stages > 1 and microbatches % stages == 0 and fixed.get("schedule", "1f1b") == "1f1b":
        found = _divisors(stage_blocks(job.shape.num_layers, stages)[1])[::-1]
    return [chunks for chunks in found if chunks == fixed.get("chunks", chunks)]


def _experts(job: Job, fixed: dict, mesh: tuple[int, ...]) -> list[int]:
    """Devices that experts may be cut over."""
    found = _divisors(math.gcd(job.shape.experts, mesh[0] * mesh[3])) if job.shape.experts else [1]
    return [n for n in found if n == fixed.get("expert", n)]


def _least_memory(job: Job, fixed: dict, mesh: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts of one mesh of which one takes no more than any other: a block that runs again never
    takes more, nor does a stage in one piece, nor experts on more devices, and of several
    micro-batches the most take least."""
    counts, experts = _microbatches(job, fixed, mesh), _experts(job, fixed, mesh)
    strategy = fixed.get("checkpointing", "block")
    shardings = _values(fixed, "sharding", layouts.SHARDINGS)
    for m, sharding in itertools.product(sorted({*counts[:1], *counts[-1:]}), shardings):
        cuts = [n for n in experts if n == 1] if sharding == "hsdp" else experts
        for cut in itertools.product(_chunks(job, fixed, mesh[2], m)[-1:], cuts[-1:]):
            yield _layout(fixed, mesh, m, sharding, strategy, *cut)


def _microbatches(job: Job, fixed: dict, mesh: tuple[int, ...]) -> list[int]:
    """Numbers of micro-batches that keep the rules, of a zero-bubble pipeline's too."""
    least = least_microbatches(fixed.get("schedule", "1f1b"), mesh[2])
    found = _divisors(job.batch // mesh[0])
    return [m for m in found if m >= least and m == fixed.get("microbatches", m)]
