"""The bytes of a step's tensors, counted while PyTorch runs it.

    with FakeTensorMode():                        # sizes without numbers: no memory, no GPU
        ...
        with Tape() as tape:
            tape.hold(model.parameters())
            cross_entropy(model(tokens), tokens).backward()
    tape.peak                                     # bytes

Every storage counts once, from the operator that makes it until nothing holds it, so views cost
nothing. The tensors may be real as well. What an operator makes and drops inside is not seen.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Count the bytes of storages while operators run: `now`, and `peak`, the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def hold(self, tensors: Iterable[object]) -> None:
        """Count what the tensors among these hold, which were made before."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()  # its Python object lives as long as it
            if key not in self._alive:
                self._alive[key] = weakref.ref(storage, lambda _, k=key, n=size: self._drop(k, n))
                self.now += size
                self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Look for the peak anew, from what there is now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, operator: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.hold(tree_leaves((args, kwargs)))
        result = operator(*args, **(kwargs or {}))
        self.hold(tree_leaves(result))
        return result

    def _drop(self, key: int, size: int) -> None:
        self.now -= size
        del self._alive[key]
