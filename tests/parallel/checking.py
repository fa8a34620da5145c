"""Checks that run in every rank of a group, all of them in one: a start of ranks takes seconds.

    torchrun --standalone --nproc-per-node 4 checking.py FOLDER cpu checks_ddp checks_fsdp

Each rank writes how its checks end to a file of its own in FOLDER, an event a line. A check is a
function that raises if something is wrong, ``@check(2)`` or ``@check(2, 4)``: the numbers of ranks
it is for. Warnings are errors in it.
"""

import contextlib
import copy
import functools
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from a2lib.parallel import FSDP, load_sharded, mean_kernel, save_sharded

MODULES = (
    "checks_ddp", "checks_copy_engines", "checks_sharded_optimizer", "checks_fsdp",
    "checks_fsdp_memory", "checks_fsdp_modules", "checks_fsdp_random", "checks_fsdp_updates",
    "checks_fsdp_whole", "checks_finish", "checks_checkpoint",
    "checks_feed_forward", "checks_leaderboard",
)  # fmt: skip
GPU_MODULES = ("checks_capture", "checks_streams")
CHECKS = {}
# How long a rank that is through with a check waits for the others.
MEET_S = 60
COLLECTIVE_LIMIT = timedelta(seconds=60)


def check(*sizes):
    def register(function):
        assert function.__name__ not in CHECKS
        CHECKS[function.__name__] = function, sizes
        return function

    return register


def names(size, modules):
    """Return the names of the checks of these modules for so many ranks."""
    for module in modules:
        importlib.import_module(module)
    found = []
    for name, (function, sizes) in CHECKS.items():
        if size in sizes and function.__module__ in modules:
            found.append(name)
    return found


def main(folder, device, modules) -> None:
    """Join the group of torchrun's ranks, run the checks and end. ``device`` is "cpu" or "cuda", a
    GPU for each rank."""
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own, timeout=COLLECTIVE_LIMIT)
        torch.set_default_device("cuda")
        # In TF32 a last bit of a weight may be a thousandth of it.
        torch.backends.cudnn.allow_tf32 = False
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)
        mean_kernel.MeanKernel = PlainMean
    events = open(Path(folder, os.environ["RANK"]), "a", buffering=1)

    def report(**event) -> None:
        events.write(f"{json.dumps(event)}\n")

    failed = run(modules, report)
    if failed:
        # No orderly end: a group is not destroyed while a failed check has graphs of its work.
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()


def run(modules, report) -> list[str]:
    """Run the checks for so many ranks. Four then are two worlds of two, with half of the checks
    for two each. A check that fails ends itself alone, if it ends on every rank."""
    torch.set_num_threads(1)
    # It also fills with NaN what nobody has written yet.
    torch.use_deterministic_algorithms(True)
    failed = run_each(names(world()[1], modules), report)
    if world()[1] == 4:
        half = pair_up()
        failed += run_each(names(2, modules)[half::2], report)
    return failed


def run_each(names, report) -> list[str]:
    """Run the checks of these names, in every rank; those that failed in this one."""
    failed, size = [], world()[1]
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.manual_seed(0)
                CHECKS[name][0]()
        except Exception:
            failed.append(name)
            report(failed=name, size=size, error=traceback.format_exc())
        else:
            report(passed=name, size=size)
        meet(name, failed[-1:] == [name])
    return failed


def pair_up() -> int:
    """Make two worlds of two ranks out of that of four; which of them this rank is in."""
    (rank, _), store = world(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    store = dist.PrefixStore(f"pair {rank // 2}", store)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2)
    return rank // 2


def meet(name, failed) -> None:
    """Raise unless every rank is through with this check and can go on to the next."""
    rank, size = world()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {rank}", str(failed))
    keys = [f"{name} {other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=MEET_S))
    except dist.DistStoreError:
        raise RuntimeError(f"another rank was not through with {name} {MEET_S} s later") from None
    if b"True" in map(store.get, keys):
        gc.collect()
        if torch.cuda.is_available():
            # Past work that others do not join, or a broken context, the next would fail too.
            torch.cuda.synchronize()


# What checks use.


def on_gpus():
    return torch.get_default_device().type == "cuda"


def world():
    return dist.get_rank(), dist.get_world_size()


@contextlib.contextmanager
def raises(kind, pattern):
    try:
        yield
    except kind as error:
        assert re.search(pattern, str(error)), str(error)
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(a, b, what=""):
    """To the bit, dtype and shape too; else how many differ, to tell a rounding from a fault."""
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    if not torch.equal(a, b):
        off, most = (a.double() - b.double()).abs(), b.double().abs().max()
        count = (~(off == 0)).sum()
        raise AssertionError(f"{what}: {count} of {off.numel()} differ, by {off.max()} of {most}")


def same_by_name(mine, theirs, what=""):
    assert mine.keys() == theirs.keys(), (what, mine.keys() ^ theirs.keys())
    for name, x in mine.items():
        same(x.detach(), theirs[name].detach(), f"{what} {name}")


def on_cpu(tensors):
    """Return tensors by name where a whole state dict has them."""
    return {name: x.cpu() for name, x in tensors.items()}


def copies_of(tensors):
    """Return what they hold now, to compare with later."""
    return [x.detach().clone() for x in tensors]


def same_each(tensors, others, what=""):
    for x, other in zip(tensors, others, strict=True):
        same(x.detach(), other, what)


def same_parameters(module, reference, what=""):
    same_by_name(dict(module.named_parameters()), dict(reference.named_parameters()), what)


def gradients(module):
    found = {}
    for name, p in module.named_parameters():
        if p.grad is not None:
            found[name] = p.grad
    return found


def same_gradients(module, reference, what="", part=None):
    """The module's are the reference's, or ``part`` of each of them."""
    theirs = gradients(reference)
    if part is not None:
        for name, whole in theirs.items():
            theirs[name] = part(whole)
    same_by_name(gradients(module), theirs, what)


def whole_weights(wrapper):
    """Its parameters, not sharded; a shared one under each of its names."""
    if isinstance(wrapper, FSDP):
        return wrapper.gather_full_params()
    return dict(wrapper.module.named_parameters(remove_duplicate=False))


def optimizers_of(modules, cls, **options):
    """Return an optimizer of each module's parameters."""
    return [cls(module.parameters(), **options) for module in modules]


def take_step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def alone():
    """Return a group of this rank; every rank makes all of them."""
    rank, size = world()
    groups = [dist.new_group([member]) for member in range(size)]
    return groups[rank]


def groups_of(module):
    """Return groups for an optimizer: the first parameter has a learning rate of its own."""
    first, *rest = module.parameters()
    return [{"params": [first], "lr": 0.01}, {"params": rest}]


def chunks_from(least_bytes, padding_bytes=2**20):
    """More chunks the smaller they may be; more broadcasts the less may be padded."""
    from a2lib.parallel import exchange

    return patch.multiple(exchange, LEAST_BYTES=least_bytes, PADDING_BYTES=padding_bytes)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding and head are one weight; one parameter is frozen, one used only if asked."""

    def __init__(self, width=6, blocks=3, words=11):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.extra = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].up.weight.requires_grad_(False)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, tokens, extra=False, checkpointed=False):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return self.head(self.extra(x) if extra else x)


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def token_batches(count, words=11):
    """One batch for each rank and step; the same on every rank."""
    generator = seeded(1)
    return [torch.randint(words, (2, 5), generator=generator) for _ in range(count)]


def token_loss(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def loss_on(tokens, **options):
    """Return the function of a module that is its loss on these tokens."""
    return lambda module: token_loss(module(tokens, **options), tokens)


def output_sum(module, batch):
    return module(batch).sum()


def output_square(module, batch):
    return module(batch).square().sum()


def losses_of(loss, batches):
    """Return, for each batch, the function of a module that is ``loss(module, batch=batch)``."""
    return [functools.partial(loss, batch=batch) for batch in batches]


def mean_gradients(reference, losses):
    """In one process: each rank's loss in turn, gradients added in that order, divided by W.

    ``losses`` has, for each rank, a list of functions of the module, one a backward.
    """
    totals = {}
    for of_rank in losses:
        reference.zero_grad()
        for loss in of_rank:
            loss(reference).backward()
        for p in reference.parameters():
            if p.grad is not None:
                totals[p] = totals[p] + p.grad if p in totals else p.grad
    reference.zero_grad()
    for p, total in totals.items():
        p.grad = total / len(losses)


def backward_of_each(wrapper, reference, losses, group=None):
    """This rank's of the group's ``losses`` through the wrapper, all of them in one process."""
    losses[dist.get_rank(group)](wrapper).backward()
    wrapper.finish_gradient_synchronization()
    mean_gradients(reference, [[loss] for loss in losses])


def moved(module, by):
    """Return a copy with weights and buffers larger by so much: by the rank, each has its own
    until the broadcast."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.copy_(x + by)
    return module


def exact(module):
    """Return the module with weights of which every sum of gradients is exact, in any order."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape) / 4)
    return module


@contextlib.contextmanager
def shared_folder(group=None):
    """One for all ranks, gone afterwards."""
    first = dist.get_rank(group) == 0
    name = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(name, group=group, group_src=0)
    yield Path(name[0])
    dist.barrier(group)
    if first:
        shutil.rmtree(name[0])


def save_and_load(folder, fsdp, other):
    """Weights of one into the other, which are then the same bytes."""
    save_sharded(folder, fsdp)
    load_sharded(folder, other)
    theirs = other.gather_full_params()
    for name, x in fsdp.gather_full_params().items():
        same(theirs[name].view(torch.uint8), x.view(torch.uint8), name)


def parts_of_tensors(counts, world, dtype):
    """Random tensors of one rank, what it received of the others, and where its parts lie."""
    from a2lib.parallel.copy_engines import Layout

    generator = seeded(0)
    own_at, received_at, rows, means_at, end, mean_end = [], [], [], [], 0, 0
    for i, count in enumerate(counts):
        own_at.append(16 * i)
        received_at.append(end)
        rows.append(-(-count // 64) * 64)
        end += rows[-1] * (world - 1)
        means_at.append(mean_end)
        mean_end += rows[-1] + 64
    tensors = []
    for count, begin in zip(counts, own_at, strict=True):
        tensors.append(torch.randn(begin + count + 3, generator=generator).to(dtype))
    received = torch.randn(end, generator=generator).to(dtype)
    return tensors, received, Layout(list(counts), own_at, received_at, rows, means_at)


class PlainMean:
    """Compute what `mean_kernel.MeanKernel` does, in plain operations.

    On a CPU it is its stand-in, and on a GPU the result to compare with. Parts are added in rank
    order in float32 (float64 for float64) and the mean is rounded once.
    """

    def __init__(self, layout, rank, world_size, device=None):
        self.layout, self.rank, self.world_size = layout, rank, world_size

    def __call__(self, tensors, received, means):
        layout = self.layout
        for i, x in enumerate(tensors):
            count = layout.counts[i]
            parts = []
            for other in range(self.world_size - 1):
                begin = layout.received_at[i] + other * layout.rows[i]
                parts.append(received[begin : begin + count])
            own = x.as_strided((count,), (1,), x.storage_offset() + layout.own_at[i])
            parts.insert(self.rank, own)
            wide = torch.float64 if means.dtype == torch.float64 else torch.float32
            total = parts[0].to(wide)
            for part in parts[1:]:
                total = total + part.to(wide)
            begin = layout.means_at[i]
            # By a tensor: a GPU would multiply by the reciprocal of a number.
            mean = total / torch.full((), len(parts), dtype=wide, device=total.device)
            means[begin : begin + count].copy_(mean)


def copied(make, *args, **options):
    """Return a wrapper that sends by copy engines."""
    with copies_on_the_cpu():
        wrapper = make(*args, communication="copy_engines", **options)
    assert wrapper.communication == "copy_engines" and wrapper.why_backend is None
    return wrapper


@contextlib.contextmanager
def copies_on_the_cpu():
    """Memory that ranks share as GPUs do theirs, so that copy engines' steps run without them."""
    if on_gpus():
        yield
        return
    from a2lib.parallel import copy_engines

    class Handle:
        def __init__(self, folder, size, group):
            self.group = group
            self.memories = []
            for rank in range(dist.get_world_size(group)):
                file = f"{folder}/{rank}"
                storage = torch.UntypedStorage.from_file(file, shared=True, nbytes=size)
                self.memories.append(torch.empty(0, dtype=torch.uint8).set_(storage))

        def get_buffer(self, rank, sizes, dtype, storage_offset=0):
            begin = storage_offset * dtype.itemsize
            (count,) = sizes
            return self.memories[rank][begin : begin + count * dtype.itemsize].view(dtype)

        def barrier(self, channel, timeout_ms):
            dist.barrier(self.group)

    def shared_memory(size, group, device):
        with shared_folder(group) as folder:
            handle = Handle(folder, size, group)
        return handle.memories[dist.get_rank(group)], handle

    shared = patch.object(copy_engines, "shared_memory", shared_memory)
    with shared, patch.object(copy_engines, "why_not", lambda *_: None):
        yield


if __name__ == "__main__":
    import checking  # what the checks import, in which they are registered

    checking.main(sys.argv[1], sys.argv[2], sys.argv[3:])
