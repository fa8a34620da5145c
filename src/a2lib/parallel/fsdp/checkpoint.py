"""Sharded checkpoints: each rank writes its own rows, and any number of ranks reads them.

    save_sharded("checkpoints/1000", fsdp, optimizer)
    load_sharded("checkpoints/1000", fsdp, optimizer)      # at another number of ranks too

A folder has a file of torch.save for each rank, rank-0.pt and so on, and SHA256SUMS, the checksum
of each (`sha256sum -c SHA256SUMS` reads it too). The rows of a parameter are those of the files, in
rank order:

    files = [torch.load(folder / f"rank-{r}.pt", map_location="cpu") for r in range(ranks)]
    whole = torch.cat([file["model"]["head.weight"] for file in files])

What every rank has whole, such as a norm's weight or a count of steps, is in each file.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from a2lib.parallel.agreement import parameters_of
from a2lib.parallel.fsdp.division import clean
from a2lib.parallel.fsdp.refusals import check_rows
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.wrapper import FSDP
from a2lib.parallel.group import everyone

CHECKSUMS, UNFINISHED = "SHA256SUMS", ".part"
FILES = "rank-*.pt"

T = TypeVar("T")


@torch.no_grad()
def save_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Write a checkpoint of an FSDP training to a new folder; every rank calls it.

    It has the master weights, rank 0's persistent buffers and the optimizer's state. All ranks must
    share the file system. The folder gets its name when everything is written, so a folder of that
    name is complete. A save that was killed leaves a folder of the name with ``.part`` behind it,
    which the next save of that name writes over. Two saves must not write to one name at once.

    The optimizer is one of torch.optim, over ``fsdp.parameters()`` or some of them.

    Raises FileExistsError where the folder exists, OSError where it cannot be made, and ValueError
    for an optimizer whose state cannot be divided by rows. Where one rank fails every rank raises:
    the others RuntimeError, which says what it was.
    """
    folder = Path(folder)
    part = folder.with_name(folder.name + UNFINISHED)

    def write() -> tuple[str, str]:
        content = {"shapes": _shapes(fsdp), "model": _tensors(fsdp), "groups": []}
        if optimizer is not None:
            content["groups"] = _groups(fsdp, optimizer)
            content["state"] = _state(fsdp, optimizer)
        if folder.exists():
            raise FileExistsError(f"{folder} exists; a checkpoint is written to a new folder")
        part.mkdir(parents=True, exist_ok=True)
        file = part / f"rank-{fsdp.rank}.pt"
        torch.save(content, file)
        try:
            _loaded(file)
        except pickle.UnpicklingError:
            raise ValueError(
                "the optimizer has a setting or a state that load_sharded would not read; allowed "
                "are numbers, text, tensors, and lists and dicts of them"
            ) from None
        return file.name, _checksum(file)

    sums = dict(everyone(_on_every_rank(write, fsdp.group), fsdp.group))

    def finish() -> None:
        if fsdp.rank != 0:
            return
        for left in part.glob(FILES):  # of a save by more ranks that was killed
            if left.name not in sums:
                left.unlink()
        with open(part / CHECKSUMS, "w") as lines:
            for name, checksum in sums.items():
                lines.write(f"{checksum}  {name}\n")
        part.rename(folder)

    _on_every_rank(finish, fsdp.group)


@torch.no_grad()
def load_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Read what ``save_sharded`` wrote into the same module and optimizer; every rank calls it.

    The number of ranks may be another than when it was saved. Weights are overwritten in place, and
    the optimizer's state and settings are replaced. Where an error is raised nothing has changed.

    Raises FileNotFoundError where there is no checkpoint. Raises ValueError where a file is not
    what was written, where the module has other names or shapes, and where the checkpoint has no
    optimizer or that of other groups. Where one rank fails every rank raises, as in a save.
    """
    folder = Path(folder)

    def read() -> list[dict]:
        files = []
        for path in _checked_files(folder):
            files.append(_loaded(path))
        _check_same(folder, files[0]["shapes"], _shapes(fsdp))
        if optimizer is not None:
            groups = _described(files[0]["groups"])
            _check_same(folder, groups, _described(_groups(fsdp, optimizer)))
        return files

    files = _on_every_rank(read, fsdp.group)
    first = files[0]
    rows_of = {}
    for p in fsdp._sharded:
        rows_of[p.names[0]] = p
    if optimizer is not None:
        state: dict[str, dict] = {}
        for name, values in first["state"].items():
            state[name] = {}
            for key in values:
                state[name][key] = _own(rows_of.get(name), files, "state", name, key)
        for saved, here in zip(first["groups"], optimizer.param_groups, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(here[key], Tensor):
                    # PyTorch moves the state alone; a captured step reads this one too.
                    saved[key] = value.to(here[key].device, copy=True)
        # A saved state may call parameters anything: they count in the order of the groups.
        optimizer.load_state_dict({"state": state, "param_groups": first["groups"]})
    for name, x in _tensors(fsdp).items():
        x.copy_(_own(rows_of.get(name), files, "model", name))


def _on_every_rank(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what ``work`` returns, once every rank has done it; collective. Where some fail each
    of them raises its error, and the others raise RuntimeError with that of the first: a rank that
    went on alone would send its next message to those that wait here."""
    problem, result, said = None, None, ""
    try:
        result = work()
    except Exception as error:
        problem, said = error, f"{type(error).__name__}: {error}"
    of_ranks = everyone(said, group)
    if problem is not None:
        raise problem
    for rank, said in enumerate(of_ranks):
        if said:
            raise RuntimeError(f"rank {rank} has failed: {said}")
    return result


# The folder.


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _loaded(path: Path) -> dict:
    """Return what a file has; its tensors are read when they are looked at."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _checked_files(folder: Path) -> list[Path]:
    """Return the ranks' files in order; raises where one is not what was written."""
    if not (folder / CHECKSUMS).is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint of save_sharded")
    checksums = {}
    for line in (folder / CHECKSUMS).read_text(errors="replace").splitlines():
        checksum, _, name = line.partition("  ")
        checksums[name] = checksum
    there = {path.name for path in folder.glob(FILES)}
    wrong = checksums.keys() ^ there
    for name in there - wrong:
        if _checksum(folder / name) != checksums[name]:
            wrong.add(name)
    if wrong:
        raise ValueError(f"{min(wrong)} in {folder} is not what was saved: its checksum is another")
    files = []
    for rank in range(len(there)):
        files.append(folder / f"rank-{rank}.pt")
    return files


# What is in it.


def _tensors(fsdp: FSDP) -> dict[str, Tensor]:
    """Return this rank's tensors of parameters and persistent buffers, by their first names."""
    tensors = {}
    for p in fsdp._parameters_in_order:
        tensors[p.names[0]] = p.master.detach()
    for prefix, module in fsdp.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # PyTorch says which are kept by the state dict alone, which is refused.
            if name not in module._non_persistent_buffers_set:
                tensors[clean(f"{prefix}.{name}" if prefix else name)] = buffer
    return tensors


def _by_master(fsdp: FSDP) -> dict[Tensor, Sharded | Replicated]:
    by_master = {}
    for p in fsdp._parameters_in_order:
        by_master[p.master] = p
    return by_master


def _state(fsdp: FSDP, optimizer: Optimizer) -> dict[str, dict]:
    by_master, state = _by_master(fsdp), {}
    for master, values in optimizer.state.items():
        p = by_master[master]
        if isinstance(p, Sharded):
            check_rows(optimizer, p, values)
        state[p.names[0]] = dict(values)
    return state


def _groups(fsdp: FSDP, optimizer: Optimizer) -> list[dict]:
    """Return the optimizer's groups, with names in the place of parameters."""
    fsdp.meet(optimizer)
    by_master, groups = _by_master(fsdp), []
    if not by_master.keys() >= set(parameters_of(optimizer.param_groups)):
        raise ValueError("the optimizer has parameters that the FSDP has not; it is of another one")
    for group in optimizer.param_groups:
        kept = {}
        for key, value in group.items():
            kept[key] = value.item() if isinstance(value, np.generic) else value
        kept["params"] = [by_master[master].names[0] for master in group["params"]]
        groups.append(kept)
    return groups


def _shapes(fsdp: FSDP) -> dict[str, list[int]]:
    """Return the whole shape of each tensor by its name."""
    shapes = {}
    for name, x in _tensors(fsdp).items():
        shapes[name] = list(x.shape)
    for p in fsdp._sharded:
        shapes[p.names[0]] = list(p.shape)
    return shapes


def _described(groups: list[dict]) -> dict[str, list[str]]:
    """Return the names of the settings and parameters of each group."""
    described = {}
    for n, group in enumerate(groups):
        described[f"optimizer group {n}"] = [*sorted(group), *group["params"]]
    return described


def _check_same(folder: Path, saved: dict[str, list], here: dict[str, list]) -> None:
    """Raise ValueError unless the checkpoint has what is to be read, and no more."""
    for name in sorted({*saved, *here}):
        there, wanted = saved.get(name, "not"), here.get(name, "not")
        if there != wanted:
            raise ValueError(
                f"{name} is {there} in {folder} and {wanted} in the training; load a checkpoint "
                "into the module and the optimizer it is of"
            )


def _own(p: Sharded | None, files: list[dict], *path: str) -> object:
    """Return this rank's part of a value that each file has a part of, the next rows of ``p``; of
    what is whole there a copy."""
    parts = []
    for part in files:
        for key in path:
            part = part[key]
        parts.append(part)
    first = parts[0]
    if not isinstance(first, Tensor):
        return first
    if p is None or first.dim() == 0:
        return first.clone()
    begin = p.rank * p.rows
    end = begin + len(p.master)
    rows, before = [], 0
    for part in parts:
        rows.append(part[max(0, begin - before) : max(0, end - before)])
        before += len(part)
    return torch.cat(rows)
