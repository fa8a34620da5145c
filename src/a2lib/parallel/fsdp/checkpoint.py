"""Sharded checkpoints: each rank writes its own rows, and any number of ranks reads them.

    save_sharded("checkpoints/1000", fsdp, optimizer)
    load_sharded("checkpoints/1000", fsdp, optimizer)      # at another number of ranks too

A folder of torch.distributed.checkpoint: {"model": {name: tensor}, "optimizer": {"state": {name:
{key: value}}, "param_groups": [...]}}, names as in the unwrapped module, a tied weight under each
of its names. A plain module reads it without this package, and so do PyTorch's own tools:

    torch.distributed.checkpoint.load({"model": module.state_dict()}, checkpoint_id=folder)
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from a2lib.parallel.fsdp.optimizers import check_rows
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.units import clean
from a2lib.parallel.fsdp.wrapper import FSDP

STATE, GROUPS = "optimizer.state.", "optimizer.param_groups."


@torch.no_grad()
def save_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Write the masters, the persistent buffers (rank 0's) and the optimizer's state; collective.

    The folder, on a file system that all ranks share, appears under its name when all of it is
    written. The optimizer is one of torch.optim over ``fsdp.parameters()``, or over some of them.

    Raises FileExistsError where the folder exists, the OSError of one that cannot be made, and
    ValueError for an optimizer whose state cannot be divided by rows.
    """
    content = {"model": _model(fsdp)}
    if optimizer is not None:
        content["optimizer"] = _optimizer(fsdp, optimizer)
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.part")
    wrong: list[OSError | None] = [None]
    if fsdp.rank == 0:
        try:
            if folder.exists():
                raise FileExistsError(f"{folder} exists; a checkpoint is written to a new folder")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as error:
            wrong = [error]
    dist.broadcast_object_list(wrong, group=fsdp.group, group_src=0)
    if wrong[0]:
        raise wrong[0]
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(content, checkpoint_id=part, planner=planner, process_group=fsdp.group)
    if fsdp.rank == 0:
        part.rename(folder)
    dist.barrier(fsdp.group)


@torch.no_grad()
def load_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Read what ``save_sharded`` wrote, at any number of ranks, into the same module and optimizer;
    collective. Weights are overwritten in place, the optimizer's state and settings replaced.

    Raises FileNotFoundError where there is none, ValueError where it has no optimizer or another
    one's groups; of weights that are missing or of another shape torch.distributed.checkpoint
    raises its CheckpointException.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(folder)} is no checkpoint of save_sharded") from None
    content = {"model": _model(fsdp)}
    if optimizer is not None:
        content["optimizer"] = _places(fsdp, optimizer, metadata, folder)
    dcp.load(content, storage_reader=reader, process_group=fsdp.group)
    if optimizer is not None:
        _take(fsdp, optimizer, content["optimizer"], folder)


def _mesh(fsdp: FSDP) -> DeviceMesh:
    return DeviceMesh.from_group(fsdp.group or dist.group.WORLD, fsdp.device.type)


def _whole(p: Sharded | Replicated, rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of which each rank has such rows, as torch.distributed.checkpoint wants it told:
    the shape too, which it would take for a multiple of a rank's."""
    if isinstance(p, Replicated):
        return rows
    stride = torch.empty(p.shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=stride)


def _model(fsdp: FSDP) -> dict[str, Tensor]:
    mesh = _mesh(fsdp)
    content = {}
    for p in fsdp._parameters_in_order:
        for name in p.names:
            content[name] = _whole(p, p.master.detach(), mesh)
    for prefix, module in fsdp.module.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                content[clean(f"{prefix}.{name}" if prefix else name)] = buffer
    return content


def _by_master(fsdp: FSDP, optimizer: Optimizer) -> dict[nn.Parameter, Sharded | Replicated]:
    fsdp._optimizers.meet(optimizer)
    known = {p.master: p for p in fsdp._parameters_in_order}
    if any(q not in known for group in optimizer.param_groups for q in group["params"]):
        raise ValueError("the optimizer has parameters that the FSDP has not; it is of another one")
    return known


def _groups(fsdp: FSDP, optimizer: Optimizer) -> list[dict]:
    known = _by_master(fsdp, optimizer)
    return [
        {**group, "params": [known[q].names[0] for q in group["params"]]}
        for group in optimizer.param_groups
    ]


def _optimizer(fsdp: FSDP, optimizer: Optimizer) -> dict:
    mesh, known = _mesh(fsdp), _by_master(fsdp, optimizer)
    state: dict[str, dict] = {}
    for master, values in optimizer.state.items():
        p = known[master]
        state[p.names[0]] = told = {}
        for key, x in values.items():
            told[key] = x
            if isinstance(x, Tensor) and x.dim() and isinstance(p, Sharded):
                check_rows(optimizer, p, key, x)
                told[key] = _whole(p, x, mesh)
    return {"state": state, "param_groups": _groups(fsdp, optimizer)}


def _places(fsdp: FSDP, optimizer: Optimizer, metadata, folder: str | os.PathLike) -> dict:
    """Where the optimizer's part is to be read to: a new optimizer has no state yet."""
    stored = metadata.state_dict_metadata
    groups = _groups(fsdp, optimizer)
    theirs = {key.removeprefix(GROUPS) for key in stored if key.startswith(GROUPS)}
    ours = {f"{n}.{key}" for n, group in enumerate(groups) for key in group}
    if theirs != ours:
        other = f"other settings ({', '.join(sorted(theirs ^ ours))})" if theirs else "no optimizer"
        raise ValueError(f"{os.fspath(folder)} has {other}; load it into an optimizer as it was")
    mesh, state = _mesh(fsdp), {}
    for p in _by_master(fsdp, optimizer).values():
        name = p.names[0]
        begin = f"{STATE}{name}."
        for key in (key.removeprefix(begin) for key in stored if key.startswith(begin)):
            told = stored[begin + key]
            place: object = 0
            if isinstance(told, TensorStorageMetadata):
                dtype = told.properties.dtype
                if isinstance(p, Sharded) and len(told.size):
                    rows = torch.empty_like(p.master, dtype=dtype)
                    place = _whole(p, rows.detach(), mesh)
                else:
                    place = torch.empty(told.size, dtype=dtype, device="cpu")
            state.setdefault(name, {})[key] = place
    return {"state": state, "param_groups": groups}


def _take(fsdp: FSDP, optimizer: Optimizer, content: dict, folder: str | os.PathLike) -> None:
    if [g["params"] for g in content["param_groups"]] != [
        g["params"] for g in _groups(fsdp, optimizer)
    ]:
        raise ValueError(f"{os.fspath(folder)} has other parameters in its groups")
    # A saved state may call parameters anything: they count in the order of the groups.
    optimizer.load_state_dict(content)
