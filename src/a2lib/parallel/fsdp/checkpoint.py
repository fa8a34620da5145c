"""Sharded checkpoints: each rank writes its own rows, and any number of ranks reads them.

    save_sharded("checkpoints/1000", fsdp, optimizer)
    load_sharded("checkpoints/1000", fsdp, optimizer)      # at another number of ranks too

A folder of torch.distributed.checkpoint: {"model": {name: tensor}, "optimizer": {"state": {name:
{key: value}}, "param_groups": [...]}}, names as in the unwrapped module, a tied weight under each
of its names. A plain module reads it without this package, and so do PyTorch's own tools:

    torch.distributed.checkpoint.load({"model": module.state_dict()}, checkpoint_id=folder)
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)

SHA256SUMS in it has the checksum of every other file (`sha256sum -c SHA256SUMS` reads it too). They
prove that the files are those that were written, not who wrote them: PyTorch unpickles parts of a
checkpoint, so that to load one is to run code. Load what you trust.
"""

import hashlib
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from a2lib.parallel.agreement import parameters_of
from a2lib.parallel.fsdp.division import clean
from a2lib.parallel.fsdp.refusals import check_rows
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.wrapper import FSDP
from a2lib.parallel.group import everyone, local

MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
CHECKSUMS, UNFINISHED = "SHA256SUMS", ".part"
# PyTorch's files in a checkpoint.
METADATA, STORED = ".metadata", ".distcp"


@torch.no_grad()
def save_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Write a checkpoint of an FSDP training to a new folder; every rank calls it.

    It has the master weights, rank 0's persistent buffers and the optimizer's state. All ranks must
    share the file system. The folder gets its name when everything is written, so a folder of that
    name is complete. A save that was killed leaves a folder of the name with ``.part`` behind it,
    which the next save of that name writes over. Two saves must not write to one name at once.

    The optimizer is one of torch.optim, over ``fsdp.parameters()`` or some of them.

    Raises FileExistsError where the folder exists, OSError where it cannot be made, and ValueError
    for an optimizer whose state cannot be divided by rows.
    """
    content = {"model": _as_stored(fsdp, _held_tensors(fsdp))}
    if optimizer is not None:
        content["optimizer"] = _optimizer_content(fsdp, optimizer)
    folder = Path(folder)
    part = folder.with_name(folder.name + UNFINISHED)
    problem = None
    if fsdp.rank == 0:
        try:
            _make_empty(folder, part)
        except OSError as error:
            problem = error
    _raise_first(everyone(problem, fsdp.group))
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(content, checkpoint_id=part, planner=planner, process_group=fsdp.group)
    lines = _checksum_lines(part, fsdp)
    if fsdp.rank == 0:
        (part / CHECKSUMS).write_text("".join(lines))
        part.rename(folder)
    dist.barrier(fsdp.group)


@torch.no_grad()
def load_sharded(folder: str | os.PathLike, fsdp: FSDP, optimizer: Optimizer | None = None) -> None:
    """Read what ``save_sharded`` wrote into the same module and optimizer; every rank calls it.

    The number of ranks may be another than when it was saved. Weights are overwritten in place, and
    the optimizer's state and settings are replaced. Where an error is raised nothing has changed.
    Each rank needs room for its part twice.

    Raises FileNotFoundError where there is no checkpoint. Raises ValueError where a file is not
    what was written, where the module has other names or shapes, and where the checkpoint has no
    optimizer or that of other groups.

    A checkpoint is code: load only what you trust.
    """
    folder = Path(folder)
    _check_files(folder, fsdp)
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    held, read = _held_tensors(fsdp), {}
    for name, (p, x) in held.items():
        read[name] = p, torch.empty_like(x)
    content: dict = {"model": _as_stored(fsdp, read)}
    if optimizer is not None:
        groups = _groups(fsdp, optimizer)
        names_in_groups = _parameters_in(groups)
        content["optimizer"] = {"state": _places(fsdp, metadata), "param_groups": groups}
    _check_names(folder, metadata, content)
    dcp.load(content, storage_reader=reader, process_group=fsdp.group)
    if optimizer is not None:
        loaded = content["optimizer"]
        if _parameters_in(loaded["param_groups"]) != names_in_groups:
            raise ValueError(f"{folder} has other parameters in its groups")
        for values in loaded["state"].values():
            for key, x in values.items():
                values[key] = local(x)
        # A saved state may call parameters anything: they count in the order of the groups.
        optimizer.load_state_dict(loaded)
    for name, (_, x) in held.items():
        _, loaded_rows = read[name]
        x.copy_(loaded_rows)


# The folder.


def _make_empty(folder: Path, part: Path) -> None:
    """Make the folder ``part`` that is written to, without what a save that was killed left."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a checkpoint is written to a new folder")
    part.mkdir(parents=True, exist_ok=True)
    for left in (part / METADATA, part / CHECKSUMS, *part.glob(f"*{STORED}")):
        left.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_lines(part: Path, fsdp: FSDP) -> list[str]:
    """Return a line for each file that rank 0 sees; each rank reads some of the files."""
    names = everyone(sorted(os.listdir(part)), fsdp.group)[0]
    lines = []
    for name in names[fsdp.rank :: fsdp.world_size]:
        lines.append(f"{_checksum(part / name)}  {name}\n")
    return sorted(itertools.chain(*everyone(lines, fsdp.group)))


def _check_files(folder: Path, fsdp: FSDP) -> None:
    """Raise, on every rank, unless each file is what was written; each rank reads some."""
    sums = None
    if fsdp.rank == 0 and (folder / CHECKSUMS).is_file():
        sums = (folder / CHECKSUMS).read_bytes()
    sums = everyone(sums, fsdp.group)[0]
    if sums is None:
        raise FileNotFoundError(f"{folder} is no checkpoint of save_sharded")
    checksums = {}
    for line in sums.decode(errors="replace").splitlines():
        checksum, _, name = line.partition("  ")
        checksums[name] = checksum
    stored = [METADATA]
    for path in folder.glob(f"*{STORED}"):
        stored.append(path.name)
    wrong = sorted(set(stored) - checksums.keys())  # of a list that was cut off
    for name in list(checksums)[fsdp.rank :: fsdp.world_size]:
        path = folder / name
        if not path.is_file() or _checksum(path) != checksums[name]:
            wrong.append(name)
    for names in everyone(wrong, fsdp.group):
        if names:
            raise ValueError(
                f"{names[0]} in {folder} is not what was saved: its checksum is another"
            )


def _raise_first(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


# The module.

Held = dict[str, tuple[Sharded | Replicated | None, Tensor]]


def _held_tensors(fsdp: FSDP) -> Held:
    """Return each tensor of this rank by its name, with its parameter, None for a buffer."""
    held: Held = {}
    for p in fsdp._parameters_in_order:
        for name in p.names:
            held[name] = p, p.master.detach()
    for prefix, module in fsdp.module.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            # PyTorch says which are kept by the state dict alone, whose weights would be gathered.
            if name not in module._non_persistent_buffers_set:
                held[clean(f"{prefix}.{name}" if prefix else name)] = None, buffer
    return held


def _as_stored(fsdp: FSDP, held: Held) -> dict[str, Tensor]:
    mesh, stored = _mesh(fsdp), {}
    for name, (p, x) in held.items():
        stored[name] = _whole(p, x, mesh)
    return stored


def _mesh(fsdp: FSDP) -> DeviceMesh:
    return DeviceMesh.from_group(fsdp.group or dist.group.WORLD, fsdp.device.type)


def _whole(p: Sharded | Replicated | None, rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor of which each rank has such ``rows``. Its shape is said, which DTensor
    would take for a multiple of this rank's."""
    if not isinstance(p, Sharded):
        return rows
    stride = torch.empty(p.shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=stride)


def _check_names(folder: Path, metadata: Metadata, content: dict) -> None:
    """Raise ValueError unless the checkpoint has the names and shapes that are to be read, and no
    other."""
    wanted, read_from = set(), [MODEL]
    for name in content["model"]:
        wanted.add(f"{MODEL}{name}")
    if "optimizer" in content:
        read_from.append(GROUPS)
        for n, group in enumerate(content["optimizer"]["param_groups"]):
            for key in group:
                wanted.add(f"{GROUPS}{n}.{key}")
    stored = metadata.state_dict_metadata
    there = set()
    for key in stored:
        if key.startswith(tuple(read_from)):
            there.add(key)
    into = "load a checkpoint into the module and the optimizer it is of"
    for key in sorted(there ^ wanted):
        lacks = "the training" if key in there else folder
        raise ValueError(f"{lacks} has no {key}; {into}")
    for name, x in content["model"].items():
        size = stored[f"{MODEL}{name}"].size
        if size != x.shape:
            raise ValueError(
                f"{name} is {tuple(size)} in {folder} and {tuple(x.shape)} in the module; {into}"
            )


# The optimizer.


def _by_master(fsdp: FSDP, optimizer: Optimizer) -> dict[nn.Parameter, Sharded | Replicated]:
    fsdp.meet(optimizer)
    by_master = {}
    for p in fsdp._parameters_in_order:
        by_master[p.master] = p
    if not by_master.keys() >= set(parameters_of(optimizer.param_groups)):
        raise ValueError("the optimizer has parameters that the FSDP has not; it is of another one")
    return by_master


def _groups(fsdp: FSDP, optimizer: Optimizer) -> list[dict]:
    by_master = _by_master(fsdp, optimizer)
    groups = []
    for group in optimizer.param_groups:
        names = [by_master[master].names[0] for master in group["params"]]
        groups.append({**group, "params": names})
    return groups


def _parameters_in(groups: list[dict]) -> list[list[str]]:
    return [group["params"] for group in groups]


def _optimizer_content(fsdp: FSDP, optimizer: Optimizer) -> dict:
    mesh, by_master = _mesh(fsdp), _by_master(fsdp, optimizer)
    state: dict[str, dict] = {}
    for master, values in optimizer.state.items():
        p = by_master[master]
        stored = state[p.names[0]] = dict(values)
        if isinstance(p, Sharded):
            check_rows(optimizer, p, values)
            for key, x in values.items():
                if isinstance(x, Tensor) and x.dim():
                    stored[key] = _whole(p, x, mesh)
    return {"state": state, "param_groups": _groups(fsdp, optimizer)}


def _places(fsdp: FSDP, metadata: Metadata) -> dict[str, dict]:
    """Return where the optimizer's state is to be read to: a new optimizer has none yet."""
    mesh, state = _mesh(fsdp), {}
    for p in fsdp._parameters_in_order:
        name = p.names[0]
        begin = f"{STATE}{name}."
        for key, value in metadata.state_dict_metadata.items():
            if key.startswith(begin):
                place = _place(p, value, mesh)
                state.setdefault(name, {})[key.removeprefix(begin)] = place
    return state


def _place(p: Sharded | Replicated, value: object, mesh: DeviceMesh) -> object:
    """Return what a stored value of a parameter's state is read to."""
    if not isinstance(value, TensorStorageMetadata):
        return 0
    dtype = value.properties.dtype
    if isinstance(p, Sharded) and len(value.size):
        return _whole(p, torch.empty_like(p.master, dtype=dtype).detach(), mesh)
    return torch.empty(value.size, dtype=dtype, device="cpu")
