"""State dicts of an FSDP's modules, and of optimizers over its parameters, are whole.

An optimizer that works element by element is right as it is, but its state is that of this rank's
rows. So from its first step on, or its first ``save_sharded`` or ``load_sharded``, its
``state_dict`` is that of whole parameters, and ``load_state_dict`` takes such. One that looks at
whole matrices, or at all parameters at once, would be wrong without an error: its step is refused.
"""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from a2lib.parallel.finish import parameters_of
from a2lib.parallel.fsdp.shards import Replicated, Sharded

# By the names of their classes, whoever wrote them.
LOOK_AT_THE_WHOLE = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"}


def hook_modules(parameters: list[Sharded | Replicated], group: dist.ProcessGroup | None) -> None:
    """Have ``state_dict`` of the modules return whole parameters, and ``load_state_dict`` take
    them; both collective."""
    by_module: dict[nn.Module, dict[str, Sharded | Replicated]] = {}
    for p in parameters:
        if p.shown is not p.master:
            for module, name in p.places:
                by_module.setdefault(module, {})[name] = p
    for module, by_name in by_module.items():
        module.register_state_dict_post_hook(_wholes_of(by_name, group))
        module.register_load_state_dict_pre_hook(_rows_for(by_name))


def _wholes_of(
    by_name: dict[str, Sharded | Replicated], group: dist.ProcessGroup | None
) -> Callable:
    @torch.no_grad()
    def put_wholes(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        for name, p in by_name.items():
            state[prefix + name] = p.whole(group)

    return put_wholes


def _rows_for(by_name: dict[str, Sharded | Replicated]) -> Callable:
    @torch.no_grad()
    def put_rows(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
        for name, p in by_name.items():
            whole = state.get(prefix + name)
            if isinstance(p, Sharded) and isinstance(whole, Tensor):
                check_whole(p, prefix + name, whole)
                state[prefix + name] = p.rows_of(whole)

    return put_rows


def check_whole(p: Sharded, name: str, x: Tensor) -> None:
    """Raise ValueError unless ``x`` has the shape of the whole parameter."""
    if x.shape != p.shape:
        raise ValueError(
            f"{name} is {tuple(p.shape)} as a whole, which load_state_dict takes; got "
            f"{tuple(x.shape)}"
        )


class Optimizers:
    """Knows the optimizers that have parameters of ``sharded``."""

    def __init__(self, sharded: list[Sharded], group: dist.ProcessGroup | None) -> None:
        self._sharded = {p.master: p for p in sharded}
        self._group = group
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def meet(self, optimizer: Optimizer) -> None:
        """Have the state dict of ``optimizer`` whole from now on, if it has parameters of these.
        Raises ValueError where it needs whole matrices."""
        if optimizer not in self._met:
            if not any(p in self._sharded for p in parameters_of(optimizer.param_groups)):
                return
            self._refuse(optimizer)
            self._met.add(optimizer)
            self._loaded.add(optimizer)  # perhaps before anybody knew
            optimizer.register_state_dict_post_hook(self._gather)
            optimizer.register_load_state_dict_pre_hook(self._divide)
            optimizer.register_load_state_dict_post_hook(self._loaded.add)
        if optimizer in self._loaded:
            self._loaded.discard(optimizer)
            self._take_rows(optimizer)

    def _refuse(self, optimizer: Optimizer) -> None:
        if dist.get_world_size(self._group) == 1:
            return
        for cls in type(optimizer).__mro__:
            if cls.__name__.lower() in LOOK_AT_THE_WHOLE:
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole matrices or at all parameters, and "
                    "FSDP's are rows: use an optimizer that works element by element, or DDP with "
                    "ShardedOptimizer"
                )

    @torch.no_grad()
    def _gather(self, optimizer: Optimizer, state_dict: dict) -> dict:
        """Return the state dict with whole tensors on the CPU; collective."""
        self.meet(optimizer)
        state = {}
        parameters = parameters_of(optimizer.param_groups)
        for i in sorted(state_dict["state"]):
            values = state_dict["state"][i]
            p = self._sharded.get(parameters[i])
            if p is not None:
                values = self._gather_values(optimizer, p, values)
            state[i] = values
        return {**state_dict, "state": state}

    def _gather_values(self, optimizer: Optimizer, p: Sharded, values: dict) -> dict:
        whole = {}
        for key in sorted(values):
            x = values[key]
            if isinstance(x, Tensor) and x.dim():
                check_rows(optimizer, p, key, x)
                x = p.gather(x, self._group).cpu()
            whole[key] = x
        return whole

    def _divide(self, optimizer: Optimizer, state_dict: dict) -> dict:
        """Return the state dict with this rank's rows."""
        # A saved group may call its parameters anything: they count in order.
        names = parameters_of(state_dict["param_groups"])
        parameters = dict(zip(names, parameters_of(optimizer.param_groups), strict=False))
        state = {}
        for name, values in state_dict["state"].items():
            p = self._sharded.get(parameters.get(name))
            if p is not None:
                values = {key: _rows(p, key, x) for key, x in values.items()}
            state[name] = values
        return {**state_dict, "state": state}

    def _take_rows(self, optimizer: Optimizer) -> None:
        """Cut what was loaded whole, before this optimizer was met or past its hooks."""
        for master, p in self._sharded.items():
            for key, x in optimizer.state.get(master, {}).items():
                if isinstance(x, Tensor) and x.shape == p.shape != master.shape:
                    optimizer.state[master][key] = p.rows_of(x)


def check_rows(optimizer: Optimizer, p: Sharded, key: str, x: Tensor) -> None:
    """Raise ValueError for a state that has not a row for each row of its parameter."""
    if x.shape != p.master.shape:
        raise ValueError(
            f"{type(optimizer).__name__}'s {key} of {p.names[0]} has not its parameter's shape: it "
            "belongs to these rows and loads at no other number of ranks"
        )


def _rows(p: Sharded, key: str, x: object) -> object:
    """Return this rank's rows of a saved state."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if hasattr(x, "to_local"):
        return x.to_local()
    check_whole(p, f"{key} of {p.names[0]}", x)
    return p.rows_of(x)
