"""What a worker does for the sections of plain attention: one task is one shape.

Memory is PyTorch's count of what tensors occupy, beyond what cuBLAS keeps for itself: its
workspaces, 32 MiB for each thread on Hopper, are taken before anything is counted.
"""

import functools
import math
import statistics
from collections.abc import Callable

import torch

from a2lib.attention import FlashAttentionPyTorch, FlashAttentionTriton, attention_reference
from a2lib.experiments.attention import PASSES, STEP
from a2lib.experiments.harness.worker import Job, Row, free_memory
from a2lib.experiments.passes import Shape, one_pass, replayed
from a2lib.lab import ATTENTION, Timing, memory, peak_bytes, synchronize
from a2lib.lab.clock import Mark
from a2lib.lab.failures import LostContext, classify, detached
from a2lib.lab.memory import expandable_segments, take_workspaces
from a2lib.theory.eager import longest

WARMUP = 5
# A call's replay takes its memory once more, beside what is there.
GRAPH_SHARE = 0.4
GRAPH_CALLS = 20


def prepare() -> None:
    """Have fp32 multiplied as fp32, not as TF32."""
    torch.set_float32_matmul_precision("highest")


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """``attention_reference`` for three dimensions, its softmax written out as a formula."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
    if is_causal:
        places = torch.arange(q.shape[-2], device=q.device)
        scores = scores.masked_fill(places > places[:, None], float("-inf"))
    exponentials = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True) @ v


ATTENTIONS: dict[str, Callable] = {
    "eager": attention_reference,
    "by_hand": by_hand,
    "a2lib": FlashAttentionTriton.apply,
    "tiled": FlashAttentionPyTorch.apply,
}


def passes(job: Job) -> None:
    """Times and memory of forward and backward of one implementation at one shape."""
    name, shape = job.spec["implementation"], Shape(**job.spec["shape"])
    if name == "a2lib" and job.device == "cpu":
        return job.refuse("unsupported", "Triton kernels need a GPU")
    if job.would_swap(shape.eager.total("backward")):
        return
    left = {key["pass"]: key for key in job.keys}
    for pass_ in [p for p in PASSES if p in left]:
        key = left.pop(pass_)
        try:
            row, lost = _measure(name, shape, pass_, job)
        except Exception as error:
            job.fail(detached(error), [key])
            if pass_ == "forward" and classify(error)[0] == "oom":
                return job.refuse("oom", "in its forward: out of memory", left.values())
        else:
            job.put({**key, **row})
            if lost:
                raise LostContext(f"after {shape}, {pass_}")
        free_memory(job.device)
    return None


def _measure(name: str, shape: Shape, pass_: str, job: Job) -> tuple[Row, bool]:
    """The values of a row, and whether the device is lost after it."""
    device = job.device

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ATTENTIONS[name](q, k, v, shape.causal)

    take_workspaces(device)
    empty = memory.allocated_bytes(device)
    *qkv, do = inputs = inputs_of(shape, device, job.seed, pass_)
    call = one_pass(attend, qkv, do, pass_)
    row: Row = {"status": "ok", **_timed(call, device, job.spec["calls"])}
    if device == "cpu":
        return row, False
    row |= {"held_bytes": memory.allocated_bytes(device) - empty, "peak_bytes": peak_bytes(call)}
    call = None
    graph, lost = _replayed(attend, inputs, pass_, row)
    return row | graph, lost


def inputs_of(shape: Shape, device: str, seed: int, pass_: str) -> tuple[torch.Tensor | None, ...]:
    """q, k, v and for a backward the gradient of the output, (batch, seq_len, head_dim)."""
    torch.manual_seed(seed)
    sizes = shape.batch, shape.seq_len, shape.head_dim
    qkv = (torch.randn(sizes, device=device, requires_grad=True) for _ in range(3))
    return (*qkv, torch.randn(sizes, device=device) if pass_ == "backward" else None)


def _timed(call: Callable[[], object], device: str, calls: int) -> Row:
    """``calls`` calls as the handout has it: the device is waited for before and after each."""
    wall, events, host = [], [], []
    for number in range(WARMUP + calls):
        synchronize(device)
        begun = Mark(device)
        result = call()
        issued, done = Mark("cpu"), Mark(device)
        synchronize(device)
        ended = Mark("cpu")
        del result
        if number >= WARMUP:
            wall.append(begun.host_ms_until(ended))
            host.append(begun.host_ms_until(issued))
            events.append(begun.ms_until(done))
    row = Timing.from_samples(wall).row(ATTENTION)
    if device == "cuda":
        row |= {"ms_event": statistics.median(events), "ms_host": statistics.median(host)}
    return row


def _replayed(attend: Callable, inputs: tuple, pass_: str, row: Row) -> tuple[Row, bool]:
    """``ms_graph``, the same pass replayed from a CUDA graph on leaves of its own; and whether the
    device is lost."""
    if row["held_bytes"] + row["peak_bytes"] > GRAPH_SHARE * memory.total_bytes("cuda"):
        return {"note": "no graph: not tried, since it takes the memory of a call once more"}, False
    *qkv, do = inputs
    make = functools.partial(one_pass, attend, qkv, do, pass_, anew=True)
    found, usable = replayed({pass_: make}, {pass_: row["ms"]}, max_n=GRAPH_CALLS)
    return found.get(pass_, {"note": "no graph: the device was lost"}), not usable


def saved(job: Job) -> None:
    """The bytes of every tensor that autograd saves in one forward."""
    name, shape = job.spec["implementation"], Shape(**job.spec["shape"])
    if job.would_swap(shape.eager.total("backward")):
        return
    qkv = inputs_of(shape, job.device, job.seed, "forward")[:3]
    found = saved_bytes(ATTENTIONS[name], qkv, shape.causal)
    known = {"status": "ok"}
    job.put(*({**key, **known, "saved_bytes": found.get(key["tensor"], 0)} for key in job.keys))


def saved_bytes(attend: Callable, qkv: tuple, causal: bool) -> dict[str, int]:
    """Tensor -> bytes of its storage, each storage once, told apart by what they are."""
    storages: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept = x.detach()  # the result of the operation itself would keep itself alive
        storages.setdefault(x.untyped_storage().data_ptr(), kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = attend(*qkv, causal)
    known = dict(zip(("q", "k", "v", "o"), (*qkv, o), strict=True))
    names = {x.untyped_storage().data_ptr(): name for name, x in known.items()}
    size = o.shape[0] * o.shape[-2] ** 2
    others = {p: x for p, x in storages.items() if p not in names and x.is_floating_point()}
    matrices = [p for p, x in others.items() if x.numel() == size]
    # In the order in which they were saved: the weights come last.
    names |= dict(zip(reversed(matrices), ("p", "exponentials"), strict=False))
    found: dict[str, int] = {}
    for place, x in storages.items():
        name = names.get(place) or _kind(x, o)
        found[name] = found.get(name, 0) + x.untyped_storage().nbytes()
    return found


def _kind(x: torch.Tensor, o: torch.Tensor) -> str:
    if x.dtype == torch.bool:
        return "mask"
    if x.numel() == o.shape[0] * o.shape[-2]:
        if x.is_floating_point():
            return "sums" if x.dim() == o.dim() else "lse"
        return "places of the maxima"
    return "other"


def limit(job: Job) -> None:
    """The longest sequence whose pass fits this GPU: predicted from the free memory, then tried."""
    if job.device == "cpu":
        return job.refuse("unsupported", "a CPU does not refuse memory: it swaps")
    for key in job.keys:
        expandable_segments(key["allocator"] == "expandable")
        try:
            job.put({**key, "status": "ok", **_limit(key, job)})
        finally:
            expandable_segments(False)


def _limit(key: Row, job: Job) -> Row:
    take_workspaces("cuda")
    free_memory("cuda")
    free = memory.free_bytes("cuda")
    sizes = key["batch"], key["head_dim"], key["causal"], free, key["pass"]
    tensors = longest(*sizes, step=STEP)
    in_blocks = key["allocator"] == "blocks"
    predicted = longest(*sizes, step=STEP, how="blocks") if in_blocks else tensors
    fits = search(functools.partial(_fits, key, job), predicted, STEP)
    found = {"room_bytes": free, "tensors_len": tensors, "predicted_len": predicted}
    return found | {"fits_len": fits, "fails_len": fits + STEP}


def search(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """The largest multiple of ``step`` that ``fits``, from ``guess`` on; 0 for none. Smaller ones
    than one that fits are taken to fit."""
    fits = functools.cache(fits)
    while guess > 0 and not fits(guess):
        guess -= step
    while guess > 0 and fits(guess + step):
        guess += step
    return max(guess, 0)


def _fits(key: Row, job: Job, seq_len: int) -> bool:
    shape = Shape(key["dtype"], key["batch"], 1, seq_len, key["head_dim"], key["causal"])
    fitted = True
    try:
        *qkv, do = inputs_of(shape, "cuda", job.seed, key["pass"])
        attend = functools.partial(attention_reference, is_causal=shape.causal)
        one_pass(attend, qkv, do, key["pass"])()
        synchronize("cuda")
    except Exception as error:
        if classify(error)[0] != "oom":
            raise
        fitted = False
    qkv = do = None
    free_memory("cuda")  # here, since the exception has let go of its frames
    return fitted
