"""An optimizer whose state is divided over the ranks: each updates its own parameters, then all
exchange them.

This is the first stage of ZeRO (Rajbhandari et al., arXiv 1910.02054) in memory: AdamW's 8 bytes a
parameter become 8/W. In communication it is not quite: it takes gradients that DDP has already
averaged, so the exchange of the parameters, (W-1)/W of their bytes in and out of each rank, comes
on top, where the paper reduce-scatters the gradients and moves no more than DDP. Its time is hidden
as far as the update goes: parameters are updated and exchanged chunk by chunk (``exchange``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # there is none by a public name

from a2lib.owners import assign
from a2lib.parallel.agreement import parameters_of
from a2lib.parallel.exchange import Chunk, lay_out
from a2lib.parallel.group import check_alike, describe, is_shard, member
from a2lib.parallel.tensors import group_by

# What a group of the local optimizer does not share with the one that is seen from outside.
NOT_SETTINGS = ("params", "param_names")


class ShardedOptimizer(Optimizer):
    """Keep each parameter's optimizer state on one rank of ``group`` (ZeRO, stage 1).

        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)

    Each parameter has an owner among the ranks, so that all ranks own about as many bytes. In
    ``step`` each rank updates the parameters that it owns, and the ranks exchange them. Parameters
    are divided as wholes, so an optimizer that looks at a whole matrix works too. Source:
    Rajbhandari et al., 2020. It sends more than theirs, because it takes averaged gradients.

    Arguments:

    - ``params`` are parameters or groups of them. Leave frozen ones out: they would be exchanged
      too.
    - ``optimizer_cls`` is a class or a ``functools.partial``; ``optimizer_cls(params, **kwargs)``
      makes the inner optimizer. It must update each parameter by itself, as those of torch.optim
      do. LBFGS does not, and is refused. Not checked: any other optimizer that reads all parameters
      to update one gives wrong results.
    - ``group`` is a process group, by default that of all ranks.

    Before ``step``, parameters and gradients must be the same on every rank, as they are behind a
    DDP wrapper. To clip, clip all gradients by their norm before ``step``. The weights then equal
    those of one process to the bit.

    Every rank calls ``step``, ``state_dict``, ``load_state_dict`` and ``add_param_group``.
    ``param_groups`` has all parameters, for learning-rate schedulers; ``state`` has this rank's. If
    an update fails, the parameter's owner raises while the other ranks wait for it: end them all,
    as torchrun does.

    Memory: with several ranks, the constructor moves the parameters into chunks, which are then
    gathered in place. Each stays the same ``Parameter`` and becomes a view of its chunk. Therefore:

    - Make the optimizer after ``module.to`` or ``load_state_dict(assign=True)``, and before a step
      is captured in a CUDA graph.
    - A tensor that shared a parameter's memory before, such as a kept ``p.detach()`` or a block
      that the parameter was a part of, no longer does.
    - A chunk is longer than its parameters by at most a quarter, or 1 MiB.
    - ``torch.save`` of some parameters writes whole chunks: clone the tensors first.

    Raises RuntimeError without a process group, and in ``step`` where a parameter's memory or the
    parameters of ``param_groups`` have changed. Raises ValueError for parameters that differ
    between ranks, share memory, are on the device meta or are shards of FSDP, and for groups that
    ``optimizer_cls`` refuses or whose parameters it moves.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: Callable[..., Optimizer],
        group: dist.ProcessGroup | None = None,
        **kwargs,
    ) -> None:
        self._rank, self._world_size = member(group)
        self._group = group
        self._local: Optimizer | None = None
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * self._world_size  # bytes of each rank
        # Each chunk with this rank's parameters in it, group by group.
        self._chunks: list[tuple[Chunk, list[list[Tensor]]]] = []
        # A group without parameters: the defaults, and the refusals, are the class's own.
        empty = optimizer_cls([{"params": []}], **kwargs)
        if isinstance(empty, torch.optim.LBFGS):
            raise ValueError("LBFGS works on all parameters at once and cannot be sharded")
        super().__init__(params, empty.defaults)
        self._check(self.param_groups)
        self._take(self.param_groups)
        own_groups = list(map(self._own_part, self.param_groups))
        self._local = optimizer_cls(own_groups, **kwargs)
        self.state = self._local.state
        if not self._stay():
            raise ValueError(f"{type(empty).__name__} moved a parameter and cannot be sharded")

    def owner(self, param: Tensor) -> int:
        """Return the rank in the group that holds the state of ``param``."""
        return self._owners[param]

    def add_param_group(self, param_group: dict) -> None:
        """Add a group as torch.optim.Optimizer does, collective; errors as the class."""
        super().add_param_group(param_group)
        if self._local is None:  # from the constructor, which assigns all groups at once
            return
        try:
            self._check(self.param_groups[-1:])
        except ValueError:
            self.param_groups.pop()
            raise
        self._take(self.param_groups[-1:])
        self._local.add_param_group(self._own_part(self.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's parameters and exchange all; returns what ``closure`` returned.

        A parameter whose ``.grad`` is None is left as it is. The host does not wait on CUDA.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ids() != self._ids_taken:
            raise RuntimeError(
                "param_groups have other parameters than were given; add_param_group adds some, "
                "and without some make another optimizer"
            )
        self._local.state = self.state  # a user's reset gives another
        _copy_settings(self.param_groups, self._local.param_groups)
        self._update_and_exchange()
        _copy_settings(self._local.param_groups, self.param_groups)
        return loss

    @torch.no_grad()
    def state_dict(self) -> dict:
        """Return the whole state on every rank, copied to the CPU, in torch's own format.

        It loads at any number of ranks, and into a plain ``optimizer_cls``. Collective: a rank that
        alone calls it waits for the others.
        """
        whole, state = super().state_dict(), {}
        # A parameter at a time, so that the device has no more than one's state beside its own.
        for i, p in enumerate(parameters_of(self.param_groups)):
            owner = self.owner(p)
            values = [None]
            if owner == self._rank and i in whole["state"]:
                values = [tree_map(_on_cpu, whole["state"][i])]
            dist.broadcast_object_list(values, group=self._group, group_src=owner, device=p.device)
            if values[0] is not None:
                state[i] = values[0]
        return {**whole, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Take a whole state, of this class at any number of ranks or of a plain optimizer; only
        this rank's part of it is kept. Raises ValueError where the groups differ."""
        super().load_state_dict({**state_dict, "state": {}})
        # A saved group may call its parameters anything, names for one: they count in order.
        groups, state = [], {}
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            mine = []
            for name, p in zip(saved["params"], group["params"], strict=True):
                if self.owner(p) == self._rank:
                    mine.append(name)
                    if name in state_dict["state"]:
                        state[name] = state_dict["state"][name]
            groups.append({**_settings(saved), "params": mine})
        self._local.load_state_dict({"param_groups": groups, "state": state})
        self.state = self._local.state

    def __getstate__(self):
        raise TypeError("a ShardedOptimizer cannot be copied or pickled; use state_dict()")

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _stay(self) -> bool:
        """Return whether each parameter is where it was laid out."""
        return all(chunk.stays() for chunk, _ in self._chunks)

    def _own_part(self, group: dict) -> dict:
        mine = [p for p in group["params"] if self.owner(p) == self._rank]
        return {**_settings(group), "params": mine}

    def _check(self, groups: list[dict]) -> None:
        """Raise ValueError, on every rank, for new groups that cannot be sharded."""
        new = parameters_of(groups)
        numbered = [(f"{n}:", p) for n, p in enumerate(new)]
        check_alike("parameters", describe(numbered), self._group)
        for p in new:
            if p.is_meta:
                raise ValueError("a parameter is on the device meta, without memory; fill it first")
            if is_shard(p):
                raise ValueError("a parameter is a shard of FSDP; give it to the optimizer's class")
        addresses = set()
        for p in parameters_of(self.param_groups):
            if p.numel() and p.data_ptr() in addresses:
                # With owners of their own, one's update is overwritten by the other's weights.
                raise ValueError("two parameters are the same memory; give one Parameter for both")
            addresses.add(p.data_ptr())

    def _take(self, groups: list[dict]) -> None:
        """Give the parameters of new groups to ranks and lay out the exchange."""
        new = parameters_of(groups)
        for trained in (True, False):  # those with a state are balanced by themselves
            alike = [p for p in new if p.requires_grad is trained]
            sizes = [p.nbytes for p in alike]
            self._owners.update(zip(alike, assign(sizes, self._loads), strict=True))
        if self._world_size > 1:
            self._lay_out(new)
        self._ids_taken = self._ids()

    def _lay_out(self, params: list[Tensor]) -> None:
        """Make chunks of the parameters, those of one dtype and device together."""
        group_of = {}
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                group_of[p] = i
        for alike in group_by(params, lambda p: (p.dtype, p.device)):
            shares: list[list[Tensor]] = [[] for _ in range(self._world_size)]
            for p in alike:
                shares[self._owners[p]].append(p)
            for chunk in lay_out(shares):
                by_group: list[list[Tensor]] = [[] for _ in self.param_groups]
                for p in chunk.params[self._rank]:
                    by_group[group_of[p]].append(p)
                self._chunks.append((chunk, by_group))

    def _update_and_exchange(self) -> None:
        if not self._chunks:
            self._local.step()
            return
        if not self._stay():
            raise RuntimeError(
                "a parameter has other memory than this optimizer gave it (by another "
                "ShardedOptimizer, module.to() or p.data = ...); make the optimizer after that"
            )
        groups = self._local.param_groups
        before = [dict(group) for group in groups]
        try:
            for chunk, by_group in self._chunks:
                for i, group in enumerate(groups):
                    # Settings too: a count of steps in a group goes up by one, not by one a chunk.
                    group.update(before[i])
                    group["params"] = by_group[i] if i < len(by_group) else []
                self._local.step()
                chunk.start(self._rank, self._group)
        finally:
            for i, group in enumerate(groups):
                group["params"] = before[i]["params"]
        for chunk, _ in self._chunks:
            chunk.finish()


def _on_cpu(x: object) -> object:
    return x.to("cpu", copy=True) if isinstance(x, Tensor) else x


def _settings(group: dict) -> dict:
    settings = dict(group)
    for key in NOT_SETTINGS:
        settings.pop(key, None)
    return settings


def _copy_settings(source: list[dict], target: list[dict]) -> None:
    for a, b in zip(source, target, strict=True):
        b.update(_settings(a))
