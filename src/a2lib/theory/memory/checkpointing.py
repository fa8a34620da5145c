"""What an activation-checkpointing strategy saves and recomputes, for N equal blocks, exactly.

A strategy is written as a plan, the calls of ``a2lib.model.checkpointing`` in order. ``BLOCK`` is a
block whose activations are saved, ``ATTENTION`` and ``FFN`` are its halves, and a tuple is a
checkpoint around the plan that it holds. Two blocks, the second under a checkpoint:
``[BLOCK, (BLOCK,)]``.

Let a block's input take I bytes, what it saves for its backward A (its input included), its
parameters' gradients G, and the most that is in use while one block's backward runs M (A and
temporaries, more than A for eager attention, whose backward makes several tensors as large as the
scores).

*Saved after the forward*: I for each checkpoint, A for each block outside of one.

*Peak of the backward.* A segment of k blocks is recomputed as a whole. While its last block's
backward runs, three things are in use: the inputs of the segments before it, the (k - 1) A of the
other blocks of the segment, and M. If the gradients exist before (gradient accumulation), the peak
is at the last segment, the first that the backward reaches. There are N / k segments, and the input
of one is part of its first block's A:

    (N / k - 1) I + (k - 1) A + M                                                       (1)

If the backward allocates the gradients (after ``zero_grad(set_to_none=True)``, the default), each
block that is done leaves G, and a segment that is done frees its input. If k G > I the peak is at
the first segment, with the gradients of all others in use:

    (N - k) G + (k - 1) A + M                                                           (2)

The number of inputs does not occur in (2): saving fewer of them gains nothing, and k = 1 is best.
The textbook's N / k I + k A (Chen et al., 2016) is (1) without M. Its minimum is at
k = sqrt(N I / A), which is below 1 if A > N I.

*Least memory.* Chen's recursion keeps about log2(N) inputs, since on the way down only the input of
each second half waits; (1) becomes log2(N) I + M. ``chain`` keeps the first input, and one more
while a block is recomputed from the start: constant in N.

*Recomputed*, in forwards of a block. A checkpoint that ends in a block repeats all of it except its
last matmul, which the backward does not need (early stop). A checkpoint that ends in a checkpoint
does not repeat that one. So segments of any size recompute 1 forward. Two levels of k recompute
1 + (k - 1) / k: each block once by itself, and once in the segment except its last. Recursive
halves recompute 1 + (log2(N) - 1) / 2, since each of the log2(N) - 1 levels below the first repeats
its first half only. The chain recomputes N (N + 1) / 2 blocks, (N + 1) / 2 forwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from a2lib.activations import OPS, PLANS, parsed
from a2lib.checks import check_name, check_sizes
from a2lib.theory.memory.step import LOSS, StepMemory, block_peaks, head_saved
from a2lib.theory.products import WIDE
from a2lib.theory.transformer import block_parameter_count

BLOCK, ATTENTION, FFN = "block", "attention", "ffn"
PARTS = {BLOCK: 1, ATTENTION: 0.5, FFN: 0.5}  # of a block
LINEAR = ("q", "k", "v", "output", "w1", "w3", "w2")

Plan = Sequence  # of BLOCK, ATTENTION, FFN, or a tuple: a checkpoint around a plan


@dataclass(frozen=True)
class BlockBytes:
    """The bytes I, A, M and G of a block, or of half a block, as the module defines them.

    Raises ValueError unless 0 < input <= saved <= peak.
    """

    input: int
    saved: int
    peak: int
    gradients: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.input <= self.saved <= self.peak or self.gradients < 0:
            raise ValueError(
                f"input {self.input}, saved {self.saved}, peak {self.peak}, gradients "
                f"{self.gradients}; allowed are 0 < input <= saved <= peak and gradients >= 0"
            )


@dataclass(frozen=True)
class Cost:
    """What a plan costs.

    kept: bytes saved after the forward
    peak: the most bytes in use in the backward
    runs: blocks that the backward recomputes (half a block counts as a half)
    cut: how many of these stop before their last matmul
    """

    kept: int
    peak: int
    runs: float
    cut: float


def plan(strategy: str, num_layers: int) -> list:
    """Return the plan of a strategy, its argument after a colon, for ``num_layers`` blocks.

    Errors as ``parsed``. ``selective`` is no plan: see ``selective_kept``.
    """
    check_sizes(num_layers=num_layers)
    name, k = parsed(strategy, num_layers, PLANS)
    if name == "none":
        return [BLOCK] * num_layers
    if name == "half":
        return [(ATTENTION,), (FFN,)] * num_layers
    if name == "recursive":
        return _recursive(num_layers)
    if name == "chain":
        inside: tuple = (BLOCK,)
        for _ in range(num_layers - 1):
            inside = (inside, BLOCK)
        return [inside]
    unit, k = (BLOCK,) if name == "nested" else BLOCK, k or 1
    sizes = [min(k, num_layers - start) for start in range(0, num_layers, k)]
    return [(unit,) * size for size in sizes]


def _recursive(n: int) -> list:
    if n == 1:
        return [(BLOCK,)]
    halves = [_recursive((n + 1) // 2), _recursive(n // 2)]
    return [half[0] if len(half) == 1 else tuple(half) for half in halves]


def cost(
    items: Plan,
    block: BlockBytes,
    *,
    fresh_gradients: bool = True,
    halves: dict[str, BlockBytes] | None = None,
) -> Cost:
    """Return what a plan costs, by playing its forward and backward through, byte by byte.

    halves: the bytes of ATTENTION and FFN, for a plan that has them
    fresh_gradients: whether each block's backward allocates its gradients; a block's ``peak`` must
        then include its own gradients

    Raises ValueError for a plan of anything else.
    """
    units = {BLOCK: block, **(halves or {})}
    play = _Play(units, fresh_gradients)
    play.forward(items, owned=False)
    kept = play.held
    play.backward(items, owned=False)
    return Cost(kept, max(play.peak, kept), play.runs, play.cut)


def _leaves(items: Plan) -> Iterator[str]:
    for item in items:
        yield from _leaves(item) if isinstance(item, tuple) else (item,)


class _Play:
    """The simulation of a plan. ``owned`` items are those inside of a checkpoint, which holds the
    first one's input."""

    def __init__(self, units: dict[str, BlockBytes], fresh: bool):
        self.units, self.fresh = units, fresh
        self.held = self.peak = 0
        self.runs = self.cut = 0.0

    def bytes(self, item) -> tuple[int, int]:
        """Return the bytes that an item holds after its forward, and those of its input."""
        first = self.unit(next(_leaves([item])))
        return first.input if isinstance(item, tuple) else first.saved, first.input

    def unit(self, item) -> BlockBytes:
        if item not in self.units:
            raise ValueError(f"plan holds {item!r}; allowed are {', '.join(self.units)} and tuples")
        return self.units[item]

    def forward(self, items: Plan, owned: bool) -> None:
        for i, item in enumerate(items):
            held, input_ = self.bytes(item)
            self.held += held - (input_ if owned and i == 0 else 0)

    def again(self, items: Plan) -> None:
        """Count the blocks that recomputing the items of a checkpoint begins, at any depth."""
        last = [item for item in items[-1:] if not isinstance(item, tuple)]
        cut = sum(PARTS[item] for item in last)
        self.runs += cut + sum(PARTS[item] for item in _leaves(items[:-1]))
        self.cut += cut

    def backward(self, items: Plan, owned: bool) -> None:
        for i in reversed(range(len(items))):
            item = items[i]
            held, input_ = self.bytes(item)
            if isinstance(item, tuple):
                self.again(item)
                self.forward(item, owned=True)
                self.backward(item, owned=True)
            else:
                self.peak = max(self.peak, self.held - held + self.unit(item).peak)
                if self.fresh:
                    self.held += self.unit(item).gradients
            self.held -= held - (input_ if owned and i == 0 else 0)


def block_bytes(step: StepMemory) -> tuple[BlockBytes, dict[str, BlockBytes]]:
    """Return I, A, M and G of a block of a step, and of its halves by name."""
    saved, entry = step.saved, step.sizes["stream"]
    s = step.shape
    kept = {
        ATTENTION: sum(n for name, n in saved.items() if name.startswith(("x0", "0a/"))),
        FFN: sum(n for name, n in saved.items() if name.startswith(("y0", "0f/"))),
    }
    of_ffn = WIDE * (3 * s.d_model * s.d_ff + s.d_model)
    whole = WIDE * block_parameter_count(s)
    gradients = {ATTENTION: whole - of_ffn, FFN: of_ffn}
    most = {ATTENTION: 0, FFN: 0}
    for half in block_peaks(step):
        of_half = half.total
        if half.name == FFN:
            of_half -= kept[ATTENTION]
        elif step.fresh:
            of_half -= of_ffn
        most[half.name] = max(most[half.name], of_half)
    halves = {
        half: BlockBytes(entry, kept[half], max(most[half], kept[half]), gradients[half])
        for half in (ATTENTION, FFN)
    }
    peak = max(half.total for half in block_peaks(step))
    return BlockBytes(entry, sum(kept.values()), peak, whole), halves


def strategy_peak(step: StepMemory, strategy: str) -> int:
    """Return the bytes at the peak of forward and backward, beyond those that are there between
    steps, under a strategy of ``a2lib.model.checkpointing``.

    The peak is in the blocks, at the head, or at the end of the backward. Raises ValueError as
    ``parsed``.
    """
    block, halves = block_bytes(step)
    layers = step.shape.num_layers
    name, ops = parsed(strategy, layers)
    if name == "selective":
        kept = layers * selective_kept(ops, step)
        highest = selective_peak(ops, step, block)
    else:
        total = cost(plan(strategy, layers), block, halves=halves, fresh_gradients=step.fresh)
        kept, highest = total.kept, total.peak
    row = WIDE * step.shape.d_model
    table = row * step.shape.vocab_size
    above = LOSS + (table + row if step.fresh else 0)
    head = head_saved(step) + 3 * step.sizes["logits"] + LOSS
    end = table + step.sizes["stream"] + above + (layers * block.gradients if step.fresh else 0)
    return max(highest + above, kept + head, end)


def selective_kept(ops: str, step: StepMemory) -> int:
    """Return the bytes that one block saves under ``selective:ops``.

    These are its input, in float32, and the outputs of ``ops``, whether the backward needs them or
    not (it does not need those of w2 and output). Raises ValueError for other ops.
    """
    check_name("ops", ops, OPS)
    s, rows = step.shape, step.batch * step.context
    sizes = {
        "q": s.q_width,
        "k": s.kv_width,
        "v": s.kv_width,
        "output": s.d_model,
        "w1": s.d_ff,
        "w3": s.d_ff,
        "w2": s.d_model,
        "heads": s.q_width,
        "scores": s.num_heads * step.context,
    }
    kept = step.sizes["stream"]
    if ops == "attention":
        if step.attention == "flash":
            kept += rows * (step.width * s.q_width + WIDE * s.num_heads)
        return kept
    names = [*LINEAR]
    if ops == "products" and step.attention == "eager":
        names += ["scores", "heads"]
    return kept + step.width * rows * sum(sizes[name] for name in names)


def selective_peak(ops: str, step: StepMemory, block: BlockBytes) -> int:
    """Return the bytes at the peak of the backward of all blocks under ``selective:ops``.

    A block's saved outputs are used up as it is recomputed. That of w2 is left, since recomputation
    stops before w2. Raises ValueError as ``selective_kept``; ``block`` is as for ``cost``.
    """
    left = step.width * step.batch * step.context * step.shape.d_model
    others = step.shape.num_layers - 1
    waiting = max(others * selective_kept(ops, step), others * block.gradients * step.fresh)
    return waiting + block.peak + (0 if ops == "attention" else left)


def repeated(strategy: str, step: StepMemory) -> dict[str, float]:
    """Return how often the backward of a step recomputes each part of its blocks' forward, under a
    strategy of ``a2lib.model.checkpointing``.

    linear: the linear layers, without the share that early stop leaves out
    attention: its two matmuls
    rest: the elementwise kernels

    The unit is a forward of all blocks. ``half`` stops before the last matmul of each half, any
    other checkpoint around blocks before that of the FFN. Raises ValueError as ``parsed``.
    """
    s = step.shape
    layers = s.num_layers
    name, ops = parsed(strategy, layers)
    linear = s.block_matrices
    if name == "selective":
        again = {"linear": 1.0 - s.d_model * s.d_ff / linear, "attention": 1.0, "rest": 1.0}
        if ops in ("linear", "products"):
            again["linear"] = 0.0
        if (ops, step.attention) in (("products", "eager"), ("attention", "flash")):
            again["attention"] = 0.0
        return again
    if name == "half":
        runs = 1.0
        cut = s.d_model * (s.d_ff + s.q_width) / linear
    else:
        total = cost(plan(strategy, layers), BlockBytes(1, 1, 1))
        runs = total.runs / layers
        cut = total.cut / layers * s.d_model * s.d_ff / linear
    return {"linear": runs - cut, "attention": runs, "rest": runs}
