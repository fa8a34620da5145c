"""The tensors of a step, counted while PyTorch runs it: how many bytes, and what they are.

    with FakeTensorMode():                        # sizes without numbers: no memory, no GPU
        model = with_fake_weights(TransformerLM.from_size(size, context, device="meta"), "cpu")
        tokens = torch.zeros(4, context, dtype=torch.long)
        with Tape() as tape:
            tape.hold("parameters", model.parameters())
            cross_entropy(model(tokens), tokens).backward()
            tape.hold("gradients", [p.grad for p in model.parameters()])
    tape.peak, tape.at_peak()                     # bytes; by name

Every storage counts once, from the operator that makes it until nothing holds it, so views cost
nothing. The tensors may be real as well. What an operator makes and drops inside is not seen, but
for the kernels of ``INSIDE``, which are counted with ``as_cuda``. Fake tensors on "cuda" go
backward only where PyTorch was built for CUDA; without, those on "cpu" have the same sizes, save
where autocast differs (a CPU's softmax stays in 16 bits).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# On CUDA these make one more tensor of their result's size for a moment.
INSIDE = (torch.ops.aten._softmax_backward_data.default,)


class Storage:
    """The bytes behind one or more tensors, and what they are: a name that was given to them, or
    the operator that made them."""

    def __init__(self, size: int, name: str) -> None:
        self.bytes = size
        self.name = name


class Tape(TorchDispatchMode):
    """Count the bytes of storages while operators run: ``now``, and ``peak``, the most so far.

    With ``as_cuda`` the tensors count too that CUDA's kernels make inside of the operators
    ``INSIDE``.
    """

    def __init__(self, *, as_cuda: bool = False) -> None:
        super().__init__()
        self.as_cuda = as_cuda
        self.now = self.peak = 0
        self._alive: dict[int, Storage] = {}
        self._references: dict[int, weakref.ref] = {}
        self._fullest: list[Storage] = []

    def hold(self, name: str, tensors: Iterable[Tensor | None]) -> None:
        """Count what these tensors hold, and call it ``name``, also where it was counted before;
        None is passed over."""
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, name).name = name

    def restart(self) -> None:
        """Look for the peak anew, from what there is now."""
        self.peak = 0
        self._look()

    def at_peak(self) -> dict[str, int]:
        """Bytes at the first moment of most bytes, by name, the most first."""
        sizes = Counter()
        for storage in self._fullest:
            sizes[storage.name] += storage.bytes
        return dict(sizes.most_common())

    def __torch_dispatch__(
        self, operator: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._see(tensor, "given")
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._see(tensor, str(operator))
        if self.as_cuda and operator in INSIDE:
            self._look(more=Storage(result.untyped_storage().nbytes(), f"inside {operator}"))
        return result

    def _see(self, tensor: Tensor, name: str) -> Storage:
        """Return what is known of a tensor's storage; one that was not known is new."""
        storage = tensor.untyped_storage()
        key = id(storage)  # PyTorch keeps the Python object as long as the storage
        if key not in self._alive:
            self._alive[key] = Storage(storage.nbytes(), name)
            self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
            self.now += self._alive[key].bytes
            self._look()
        return self._alive[key]

    def _look(self, more: Storage | None = None) -> None:
        """Note the moment if it is the fullest so far."""
        inside = [more] if more else []
        total = self.now + sum(storage.bytes for storage in inside)
        if total > self.peak:
            self.peak = total
            self._fullest = [*self._alive.values(), *inside]

    def _drop(self, key: int) -> None:
        self.now -= self._alive.pop(key).bytes
        del self._references[key]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from tensors_in(branch)


def with_fake_weights(model: nn.Module, device: str) -> nn.Module:
    """Return ``model``, built on "meta", with weights and buffers on ``device``: fake ones, where a
    FakeTensorMode is on."""
    weights = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device=device)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # what is in no state dict
                empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                setattr(module, name, empty)
    return model
