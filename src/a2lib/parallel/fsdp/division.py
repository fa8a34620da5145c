"""Choose the parameters that are divided, and the unit of each.

Sharding follows parameters, not class names: every floating one of two or more dimensions. Each
element of an outermost ModuleList or Sequential is a unit, all else is the root's, and so is a
weight that two units share. An element without a forward, such as a ModuleList, is looked into.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from a2lib.parallel.fsdp.shards import Place, Replicated, Sharded

# What is divided and cast. Another dtype, such as the 8 bits of weights whose scale their module
# knows of, stays whole as it is.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Division:
    """The parameters and units of a module. A unit has the name of its module; that of the root is
    "", and comes first."""

    parameters: list[Sharded | Replicated]  # in the module's order
    of_unit: dict[str, list[Sharded | Replicated]]
    modules: dict[str, nn.Module]  # of the units
    owners: set[nn.Module]  # modules that have a parameter of two or more dimensions


def divide(
    root: nn.Module, compute_dtype: torch.dtype | None, rank: int, world_size: int
) -> Division:
    """Turn the parameters of ``root`` into this rank's rows, in place."""
    names_of_units = unit_modules(root)
    places = places_of(root, names_of_units)
    division = Division([], {"": []}, {"": root}, set())
    for module, name in names_of_units.items():
        division.modules[name] = module
        division.of_unit[name] = []
    for p, found in places.items():
        if p.dim() >= 2:
            division.owners.update(found.modules())
    for p, found in places.items():
        dtype = p.dtype
        beside_a_matrix = not division.owners.isdisjoint(found.modules())
        if compute_dtype and p.dtype in FLOATING and beside_a_matrix:
            dtype = compute_dtype
        p.grad = None
        if p.dim() >= 2 and p.numel() and p.dtype in FLOATING:
            parameter = Sharded(found.names, p, dtype, found.places, rank, world_size)
        else:
            parameter = Replicated(found.names, p, dtype, found.places)
        division.parameters.append(parameter)
        unit = found.users.pop() if len(found.users) == 1 else ""
        division.of_unit[unit].append(parameter)
    return division


def clean(name: str) -> str:
    """Return a parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def unit_modules(root: nn.Module) -> dict[nn.Module, str]:
    """Return the elements of the outermost ModuleLists and Sequentials below ``root`` that own a
    parameter of two or more dimensions, with their names."""
    names: dict[nn.Module, str] = {}  # a module at two places is a single unit

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, nn.ModuleList | nn.Sequential) and runs(child):
                if any(p.dim() >= 2 for p in child.parameters()):
                    names.setdefault(child, path)
            else:
                visit(f"{path}.", child)

    visit("", root)
    names.pop(root, None)
    return names


def runs(module: nn.Module) -> bool:
    """Return whether it has a forward. A container that is only looked into is never called."""
    return type(module).forward is not nn.Module.forward


@dataclass
class _Found:
    """Where a parameter is."""

    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)  # a module and its name for it, once each
    users: set[str] = field(default_factory=set)  # units; "" where the root has it outside of them

    def modules(self) -> list[nn.Module]:
        return [module for module, _ in self.places]


def places_of(root: nn.Module, unit_names: dict[nn.Module, str]) -> dict[nn.Parameter, _Found]:
    """Return where each parameter is, those of a module at two places once."""
    places: dict[nn.Parameter, _Found] = {}

    def visit(module: nn.Module, prefix: str, user: str) -> None:
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            found = places.setdefault(p, _Found())
            found.names.append(clean(prefix + name))
            found.users.add(user)
            if (module, name) not in found.places:
                found.places.append((module, name))
        for name, child in module._modules.items():  # the public names leave out a second place
            if child is not None:
                visit(child, f"{prefix}{name}.", user or unit_names.get(child, ""))

    visit(root, "", "")
    return places
