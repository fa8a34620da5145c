"""Record a step's allocations, with what belongs to the model, what backward keeps, and phases."""

import contextlib
import functools
import itertools
import pickle
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from a2lib.lab.saved import follow
from a2lib.lab.snapshot.reading import NOTES
from a2lib.theory.memory.step import GRADIENTS, OPTIMIZER, PARAMETERS, SAVED
from a2lib.theory.products import check_name

MAX_ENTRIES = 1_000_000
SAVING = ("forward", "loss")  # phases that build a graph
FRAMES = 40  # innermost frames of Python that a CPU's event keeps


class Recorder:
    """Writes a snapshot to ``path`` when its ``with`` ends, however it ends.

    Enter it before the model is built. ``watch`` names a model's parameters and an optimizer's
    state; ``phase(name)`` brackets a stretch of the step, "step 0/forward" where it is inside of
    another, and what autograd saves in one of ``SAVING`` is known as saved for backward.

    On "cuda" the allocator's own history is kept, which slows the process for good: take no times
    in it. On "cpu" every storage of a tensor that an operator makes counts; workspaces inside of
    operators do not.

    What a checkpoint computes again in backward is temporary, as it is freed there. Raises
    ValueError for another device, and, when it is entered, for a path whose folder is not there;
    OSError, with the path, where the file cannot be written.
    """

    def __init__(self, path: str | Path, device: str):
        check_name("device", device, ("cuda", "cpu"))
        self.path, self.device = Path(path), device
        self._phases: list[tuple[str, float, float]] = []
        self._owners: list[tuple[str, int, str, float]] = []
        self._model = self._optimizer = None
        self._modules: list[str] = []
        self._inside: list[str] = []
        self._kept: list[tuple[str, weakref.ref]] = []

    def __enter__(self) -> Self:
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.path}: no such folder")
        if self.device == "cpu":
            self._storages = _storages_mode()
            self._storages.__enter__()
        else:
            from torch.cuda import memory

            memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        return self

    def __exit__(self, *failure) -> None:
        if self.device == "cpu":
            self._storages.__exit__(*failure)
            snapshot = self._storages.snapshot()
        else:
            from torch.cuda import memory

            snapshot = memory._snapshot()
            memory._record_memory_history(enabled=None)
        self._model = self._optimizer = None  # a run gives its memory back
        most = MAX_ENTRIES if self.device == "cuda" else None
        snapshot[NOTES] = {"phases": self._phases, "owners": self._owners, "max_entries": most}
        try:
            self.path.write_bytes(pickle.dumps(snapshot))
        except OSError as error:  # that of a full device does not say which file
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def watch(self, model, optimizer=None, *, modules: bool = True) -> None:
        """Know what this model and this optimizer hold, from now on at the end of every phase.

        With ``modules`` what is saved has the name of its module, by hooks on each: not for a model
        that is compiled.
        """
        self._model, self._optimizer = model, optimizer
        if modules:
            follow(model, self._modules)
        self._look()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        self._inside.append(name)
        path, start = "/".join(self._inside), _now()
        try:
            with contextlib.ExitStack() as stack:
                if self._model is not None and name in SAVING:
                    stack.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
                yield
                self._look()
        finally:
            self._inside.pop()
            self._phases.append((path, start, _now()))

    def _saved(self, tensor):
        # Looked at when the phase ends: holding the tensor would change what is measured.
        name = self._modules[-1] if self._modules else ""
        self._kept.append((name, weakref.ref(tensor.untyped_storage())))
        # Without its graph: where no backward comes, a result that its own operation keeps would
        # never be freed.
        return tensor.detach()

    def _own(self, category: str, name: str, storage) -> None:
        if storage.device.type == self.device and storage.nbytes():
            self._owners.append((category, storage.data_ptr(), name, _now()))

    def _look(self) -> None:
        if self._model is None:
            return
        for name, reference in self._kept:
            storage = reference()
            if storage is not None:
                self._own(SAVED, name, storage)
        self._kept.clear()
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        for name, tensor in tensors:
            self._own(PARAMETERS, name, tensor.untyped_storage())
            if tensor.grad is not None:
                self._own(GRADIENTS, name, tensor.grad.untyped_storage())
        if self._optimizer is None:
            return
        names = {tensor: name for name, tensor in tensors}
        for parameter, state in self._optimizer.state.items():
            for key, tensor in state.items():
                if hasattr(tensor, "untyped_storage"):
                    name = f"{names.get(parameter, '')} {key}".strip()
                    self._own(OPTIMIZER, name, tensor.untyped_storage())


def _now() -> int:
    return time.time_ns() // 1000


def _storages_mode():
    """A mode that writes the events of storages which operators make, in the allocator's form."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def storages(tree):
        tensors = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
        return [x.untyped_storage() for x in tensors]

    class Storages(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.events: list[dict] = []
            # Address -> size and watcher; what operators were given is from before the recording.
            self.alive: dict[int, tuple] = {}
            self.before: dict[int, weakref.ref] = {}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for storage in storages((args, kwargs)):
                address = storage.data_ptr()
                if address not in self.alive and address not in self.before:
                    self.before[address] = weakref.ref(
                        storage, lambda _, address=address: self.before.pop(address)
                    )
            result = function(*args, **(kwargs or {}))
            for storage in storages(result):
                self.found(storage)
            return result

        def found(self, storage) -> None:
            address, size = storage.data_ptr(), storage.nbytes()
            if not size or address in self.alive or address in self.before:
                return
            # The watcher is kept: a reference that nobody holds calls nobody.
            watcher = weakref.ref(storage, lambda _: self.freed(address))
            self.alive[address] = (size, watcher)
            self.event("alloc", address, size, _frames())

        def freed(self, address: int) -> None:
            size, _ = self.alive.pop(address)
            for action in ("free_requested", "free_completed"):
                self.event(action, address, size, [])

        def event(self, action: str, address: int, size: int, frames: list) -> None:
            event = {"action": action, "addr": address, "size": size, "frames": frames}
            self.events.append(event | {"stream": 0, "time_us": _now()})

        def snapshot(self) -> dict:
            """A segment for each storage that is alive."""
            segments = []
            for address, (size, _) in self.alive.items():
                block = {"address": address, "size": size, "requested_size": size, "frames": []}
                segment = {"device": 0, "address": address, "total_size": size, "stream": 0}
                segments.append(segment | {"blocks": [block | {"state": "active_allocated"}]})
            return {"segments": segments, "device_traces": [list(self.events)]}

    return Storages()


def _frames() -> list[dict]:
    stack = itertools.islice(traceback.walk_stack(sys._getframe(3)), FRAMES)
    return [_frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]


@functools.lru_cache(maxsize=65_536)
def _frame(filename: str, line: int, name: str) -> dict:
    # One object for each: the pickle then holds it once.
    return {"filename": filename, "line": line, "name": name}
