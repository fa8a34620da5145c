"""FSDP's checkpoints: saved by some ranks, loaded by others."""

import copy
import random
from pathlib import Path
from unittest.mock import patch

import checking
import numpy as np
import torch
import torch.distributed as dist
from checking import Tied, alone, check, groups_of, raises, same, seeded, shared_folder, world
from checks_fsdp import check_weights
from torch import nn
from torch.optim import SGD, AdamW

from a2lib.parallel import FSDP, load_sharded, save_sharded
from a2lib.parallel.fsdp import checkpoint


class Uneven(Tied):
    """Rows that 2 and 4 ranks do not divide, fewer rows than ranks, a buffer that is not kept."""

    def __init__(self):
        super().__init__(width=5)
        self.thin = nn.Linear(5, 1)
        self.low = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def step(number, optimizer, module, reference, plain, group):
    """One step of both, with gradients made by name; parameters unused and frozen have none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = dict(module.named_parameters())
    for n, (name, p) in enumerate(reference.named_parameters()):
        if not p.requires_grad or name.startswith("never"):
            continue
        p.grad = torch.randn(p.shape, generator=seeded(100 * number + n))
        rows = -(-p.shape[0] // size)
        part = p.grad[rank * rows : (rank + 1) * rows] if p.dim() >= 2 else p.grad
        mine[name].grad = part.clone()
    optimizer.step()
    plain.step()


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def kinds():
    # Not fused: on a CPU that rounds a tensor's last elements, which fill no vector, otherwise.
    yield AdamW, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}
    yield SGD, {"lr": 0.1}  # no state


@check(4)
def checkpoints_are_loaded_at_other_sizes():
    """2 -> 4 -> 1 ranks, then by a plain module and optimizer, each time going on to the bit."""
    rank, _ = world()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    first = Uneven()
    for cls, options in kinds():
        # A 16-bit parameter is a float32 master from the start.
        reference = copy.deepcopy(first)
        reference.low.data = reference.low.data.float()
        plain = cls(groups_of(reference), **options)
        last = None
        with shared_folder() as folder:
            for number, (group, name) in enumerate(
                ((pair, f"pair {rank // 2}"), (None, "all"), (alone(), f"alone {rank}"))
            ):
                # Weights and buffers of its own, until it loads.
                module = copy.deepcopy(first) if number == 0 else Uneven()
                fsdp = FSDP(module, group=group)
                optimizer = cls(groups_of(module), **options)
                if number:
                    load_sharded(folder / last, fsdp, optimizer)
                    same(module.scale, first.scale)
                    check_weights(fsdp, reference, name, group)
                    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
                for one in (optimizer, plain):
                    one.param_groups[0]["lr"] *= 0.9
                step(number, optimizer, module, reference, plain, group)
                check_weights(fsdp, reference, name, group)
                save_sharded(folder / name, fsdp, optimizer)
                last = "pair 0" if number == 0 else name
                dist.barrier()
            check_plain(folder / last, reference, plain)


def check_plain(folder, reference, plain):
    """PyTorch alone: the file of one rank has everything whole."""
    file = torch.load(folder / "rank-0.pt")
    kept = dict(reference.named_parameters())
    kept["scale"] = reference.scale
    checking.same_by_name(file["model"], kept)
    assert not sorted(folder.parent.glob("*.part"))
    state = file["state"]
    for name, p in reference.named_parameters():
        checking.same_by_name(state.pop(name, {}), plain.state.get(p, {}), name)
    assert not state


@check(2)
def checkpoints_refuse():
    rank, _ = world()
    module = Tied()
    fsdp = FSDP(module)
    with shared_folder() as folder:
        save_sharded(folder / "weights", fsdp)
        with raises(FileExistsError, "weights exists; a checkpoint is written to a new folder"):
            save_sharded(folder / "weights", fsdp)
        with raises(OSError, "Not a directory"):
            save_sharded(folder / "weights" / "SHA256SUMS" / "x", fsdp)
        with raises(ValueError, "optimizer group 0 is not in .*weights and .* in the training"):
            load_sharded(folder / "weights", fsdp, AdamW(fsdp.parameters()))
        with raises(FileNotFoundError, "nowhere is no checkpoint of save_sharded"):
            load_sharded(folder / "nowhere", fsdp)
        whole = fsdp.gather_full_params()
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        load_sharded(folder / "weights", fsdp)
        checking.same_by_name(fsdp.gather_full_params(), whole)
        with raises(ValueError, "has parameters that the FSDP has not"):
            save_sharded(folder / "other", fsdp, AdamW(Tied().parameters()))
        for p in module.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        rows = SGD(module.parameters())
        rows.state[module.embed.weight]["row_var"] = torch.zeros(len(module.embed.weight))
        with raises(ValueError, r"SGD's row_var of embed.weight is \(\d,\), not \(\d, 6\)"):
            save_sharded(folder / "rows", fsdp, rows)
        assert names_in(folder) == {"weights"}
        dist.barrier()


def one_step_later(**sizes):
    """Return an FSDP of a Tied and an optimizer that has stepped."""
    fsdp = FSDP(Tied(**sizes))
    optimizer = AdamW(fsdp.parameters())
    for p in fsdp.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    return fsdp, optimizer


def all_tensors(fsdp, optimizer):
    """Return all that a load may change, by name."""
    tensors = {"lr": torch.tensor(optimizer.param_groups[0]["lr"])}
    for name, p in fsdp.module.named_parameters():
        tensors[name] = p.detach().clone()
        for key, x in optimizer.state.get(p, {}).items():
            tensors[f"{name} {key}"] = x.clone()
    return tensors


def load_refused(fsdp, optimizer, folder, line, error=ValueError):
    """Assert that a load raises, and changes nothing."""
    before = all_tensors(fsdp, optimizer)
    with raises(error, line):
        load_sharded(folder, fsdp, optimizer)
    checking.same_by_name(all_tensors(fsdp, optimizer), before)


def write_once(path, content):
    """Have rank 0 write, or remove where there is no content, when no rank reads."""
    dist.barrier()
    if world()[0] == 0:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    dist.barrier()


@check(2)
def a_damaged_checkpoint_changes_nothing():
    """A bit of each file is turned, its end is cut off, it is gone."""
    other = one_step_later()
    places = random.Random(0)  # the same on every rank
    with shared_folder() as folder:
        saved = folder / "saved"
        save_sharded(saved, *one_step_later())
        assert names_in(saved) == {"SHA256SUMS", "rank-0.pt", "rank-1.pt"}
        for path in sorted(saved.iterdir()):
            whole = path.read_bytes()
            place = places.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[place] ^= 1 << places.randrange(8)
            for content in (damaged, whole[:place]):
                write_once(path, content)
                load_refused(*other, saved, "is not what was saved: its checksum")
            write_once(path, None)
            if path.name == "SHA256SUMS":
                load_refused(*other, saved, "is no checkpoint of save_sh", FileNotFoundError)
            else:
                load_refused(*other, saved, "is not what was saved")
            write_once(path, whole)
        load_sharded(saved, *other)


@check(2)
def a_checkpoint_of_another_module_changes_nothing():
    with shared_folder() as folder:
        saved = folder / "saved"
        save_sharded(saved, *one_step_later())
        smaller, larger = one_step_later(blocks=2), one_step_later(blocks=4)
        load_refused(*smaller, saved, r"^blocks.2.down.weight is \[6, 18\] in .*saved and not in")
        load_refused(*larger, saved, r"^blocks.3.down.weight is not in .*saved and \[6, 18\] in")
        wider = one_step_later(words=12)
        load_refused(*wider, saved, r"embed.weight is \[11, 6\] in .* and \[12, 6\]")
        fsdp, _ = one_step_later()
        reverse = AdamW(list(fsdp.parameters())[::-1])
        load_refused(fsdp, reverse, saved, "optimizer group 0 is")
        dist.barrier()


@check(2)
def where_one_rank_fails_every_rank_raises():
    """And none goes on alone, while the others wait for it."""
    rank, _ = world()
    fsdp, optimizer = one_step_later()
    with shared_folder() as folder:
        for failing in (0, 1):
            fails = OSError("no space left") if rank == failing else None
            kind, line = RuntimeError, f"^rank {failing} has failed: OSError: no space left$"
            if fails:
                kind, line = OSError, "^no space left$"
            name = folder / f"saved {failing}"
            with patch.object(checkpoint, "_checksum", side_effect=fails, return_value=""):
                with raises(kind, line):
                    save_sharded(name, fsdp, optimizer)
            save_sharded(name, fsdp, optimizer)
            with patch.object(
                checkpoint, "_checked_files", wraps=checkpoint._checked_files
            ) as files:
                files.side_effect = fails
                load_refused(fsdp, optimizer, name, line, kind)
            load_sharded(name, fsdp, optimizer)
        # Who renames, where the name is taken meanwhile.
        with patch.object(Path, "rename", side_effect=OSError("taken")):
            kind, line = (RuntimeError, "^rank 0 has failed: OSError: taken$")
            if rank == 0:
                kind, line = OSError, "^taken$"
            with raises(kind, line):
                save_sharded(folder / "late", fsdp, optimizer)
        dist.barrier()


@check(2)
def settings_are_loaded_as_they_were():
    """A number of NumPy's as a number, a tensor to where it is; what is neither is not saved."""
    fsdp, optimizer = one_step_later()
    [group] = optimizer.param_groups
    group["lr"], group["eps"] = torch.tensor(0.25), np.float64(0.5)
    with shared_folder() as folder:
        save_sharded(folder / "saved", fsdp, optimizer)
        # A device that is not that of the file, where there is no GPU.
        group["lr"] = torch.empty((), device="meta")
        load_sharded(folder / "saved", fsdp, optimizer)
        [group] = optimizer.param_groups
        assert group["lr"].is_meta and type(group["eps"]) is float and group["eps"] == 0.5
        group["lr"] = torch.tensor(0.0)
        load_sharded(folder / "saved", fsdp, optimizer)
        [group] = optimizer.param_groups
        assert group["lr"] == 0.25
        group["schedule"] = Path("other")
        with raises(ValueError, "^the optimizer has a setting .* that load_sharded would not read"):
            save_sharded(folder / "other", fsdp, optimizer)
        assert names_in(folder) == {"saved", "other.part"}
        dist.barrier()


@check(2)
def what_a_killed_save_has_left_is_written_over():
    """And nothing else is touched: not what another name has, nor what is no save's."""
    rank, _ = world()
    fsdp = FSDP(Tied())
    with shared_folder() as folder:
        if rank == 0:
            for part in ("saved.part", "at work.part"):
                (folder / part).mkdir()
                for name in ("rank-7.pt", "SHA256SUMS", "a reader's"):
                    (folder / part / name).write_text("left")
        dist.barrier()
        save_sharded(folder / "saved", fsdp)
        assert names_in(folder) == {"saved", "at work.part"}
        left = {"SHA256SUMS", "a reader's"}
        assert names_in(folder / "saved") == {*left, "rank-0.pt", "rank-1.pt"}
        assert names_in(folder / "at work.part") == {*left, "rank-7.pt"}
        load_sharded(folder / "saved", fsdp)
        dist.barrier()


@check(2)
def checkpoints_have_the_names_of_the_plain_module():
    """Compiled blocks and 16 bits computed in; loaded into a module that is neither."""
    module, reference = Tied(), Tied()
    module.load_state_dict(reference.state_dict())
    module.blocks[0] = torch.compile(module.blocks[0], backend="eager")
    fsdp = FSDP(module, compute_dtype=torch.bfloat16)
    with shared_folder() as folder:
        save_sharded(folder / "weights", fsdp)
        other = FSDP(Tied())
        load_sharded(folder / "weights", other)
        check_weights(other, reference, "loaded")
        dist.barrier()
