"""List what autograd keeps for a backward: every tensor once, with the module that saves it.

    x = x.requires_grad_()
    output, saved = saved_for_backward(block, x)
    sum(storage.bytes for storage in saved if storage.module == "attn")

Two counts meet here. Hooks see each tensor as it is saved, which gives bytes and modules; the graph
itself, walked afterwards, gives the operations. A tensor that several operations keep is one
storage and counts once, in full, even where a view of it is kept; the first module in the forward's
order owns it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Saved:
    """One storage. ``operations`` are "MmBackward0.self" and the like, of all that keep it; none
    for what only Python code outside of the graph's own nodes keeps."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    operations: list[str] = field(default_factory=list)


def saved_for_backward(model, *inputs) -> tuple[object, list[Saved]]:
    """``model(*inputs)`` and what it keeps, in the order in which it was first kept.

    The model's parameters and buffers do not count. For eager code, on any device; what a
    checkpoint leaves out is not kept, and so not here. Nothing of the result holds the tensors.
    """
    from torch.autograd.graph import saved_tensors_hooks

    of_model = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, Saved] = {}
    held = []  # until the end: an address must not be given to another tensor
    inside: list[str] = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Detached: a result that its own operation keeps with its graph is never freed.
        kept = tensor.detach()
        held.append(kept)
        if address not in of_model and address not in storages and storage.nbytes():
            module = inside[-1] if inside else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            storages[address] = Saved(module, tuple(tensor.shape), dtype, storage.nbytes())
        return kept

    hooks = follow(model, inside)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    _name_operations(output, storages)
    return output, list(storages.values())


def follow(model, inside: list[str]) -> list:
    """Hooks by which ``inside`` has the names of the modules that are being called, the innermost
    last; to be removed by the caller."""

    def leave(*_) -> None:
        inside.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
            module.register_forward_hook(leave, always_call=True),
        ]
    return hooks


def saved_rows(saved: Iterable[Saved]) -> list[dict[str, object]]:
    """Rows of the bulk table ``saved``, in order."""
    rows = []
    for number, storage in enumerate(saved):
        row = {
            "number": number,
            "module": storage.module,
            "operations": " ".join(storage.operations),
            "shape": "x".join(map(str, storage.shape)),
            "dtype": storage.dtype,
            "bytes": storage.bytes,
        }
        rows.append(row)
    return rows


def _name_operations(output, storages: dict[int, Saved]) -> None:
    """Give each storage the operations in the graph of `output` that keep it."""
    import torch

    # From the first operation of the forward on, as autograd numbers them.
    for node in sorted(_nodes(output), key=lambda node: node._sequence_nr()):
        for name, value in _kept(node):
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storage = storages.get(tensor.untyped_storage().data_ptr())
                    if storage is not None:
                        storage.operations.append(f"{node.name()}.{name}")


def _nodes(output) -> set:
    """Return the nodes of the graph that made `output`, tensors in tuples, lists and the like."""
    import torch
    from torch.utils._pytree import tree_leaves

    seen = set()
    waiting = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            waiting.append(leaf.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def _kept(node) -> Iterator[tuple[str, object]]:
    """Yield name and value of all that a node keeps for its backward."""
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            yield attribute.removeprefix("_saved_"), getattr(node, attribute)
    if hasattr(node, "saved_tensors"):  # a Function of Python
        for number, tensor in enumerate(node.saved_tensors):
            yield str(number), tensor
