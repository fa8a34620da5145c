"""Units, of which each travels as a whole: a module whose parameters are gathered before it runs
and freed after it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2lib.parallel.copy_engines import SharedMemory, Then
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.transfers import (
    Alike,
    BackendTransfer,
    CopiedTransfer,
    Prepared,
    SideBySide,
)
from a2lib.parallel.lane import Lane
from a2lib.parallel.tensors import copy_all, group_by

# What an observer is told of a unit: on the stream of transfers, that its all-gather or its
# reduce-scatter begins and has ended; on the stream that computes, that its turn has come, and that
# what it waited for is there.
MOMENTS = ("gather begins", "gather ends", "turn", "computes", "reduce begins", "reduce ends")


class Unit:
    """The sharded and the cast ones of a module's parameters.

    The whole matrices of one dtype lie side by side in one storage, whose memory is there only
    between ``issue`` and ``free``. Views that autograd saved see the bytes that come back, since
    the storage object stays. So do the casts of their gradients, and this rank's rows of the means:
    what is taken once a unit costs the host less than once a matrix. For the host's sake too, what
    is the same at each step is made once: views, slots, and what changes places in the modules.

    Memory is taken and given back on the current stream alone, and the lane touches it only between
    an event there and one that the current stream waits for: no block is reused too early.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: list[Sharded | Replicated],
        lane: Lane,
        group: dist.ProcessGroup | None,
        shared: SharedMemory | None,
    ) -> None:
        self.name, self.module = name, module
        self.sharded: list[Sharded] = []
        self.cast: list[Replicated] = []
        trained: list[Sharded] = []
        for p in parameters:
            if isinstance(p, Sharded):
                self.sharded.append(p)
                if p.master.requires_grad:
                    trained.append(p)
            elif p.shown is not p.master:
                self.cast.append(p)
        self.parameters = [*self.sharded, *self.cast]
        self.gathered = False
        self.shown = True  # the modules have the whole parameters
        self.in_backward = False  # its backward has begun, and its gradients have not left
        self.began_at: object = None  # the mark of the node at which it began
        self.calls = 0  # outside of a backward, since the last forward of the whole began
        self.observer: Callable[[str, str], object] | None = None
        self._lane = lane
        self._filled: torch.cuda.Event | None = None
        self._lay_out()
        groups = group_by(trained, lambda p: (p.master.dtype, p.shown_dtype))
        self._alike = list(map(Alike, groups))
        # Copy engines need memory that ranks share.
        self._transfer: BackendTransfer | CopiedTransfer
        if shared is None:
            self._transfer = BackendTransfer(self.sharded, group)
        else:
            self._transfer = CopiedTransfer(self.sharded, self._alike, shared)
        self._versions = self._versions_now()
        for storage, _ in self._storages:
            storage.resize_(0)
        self._cast_copies: list[Tensor] = []
        self._cast_masters: list[Tensor] = []
        for p in self.cast:
            # By data, which counts no change: backward may have saved the same values.
            self._cast_copies.append(p.shown.data)
            self._cast_masters.append(p.master)
        # What takes the place of what in the modules, by dict: by setattr it would take the host
        # longer.
        self._to_show: list[tuple[dict, str, object]] = []
        self._to_hide: list[tuple[dict, str, object]] = []
        for p in self.parameters:
            for owner, place in p.places:
                self._to_show.append((owner._parameters, place, p.shown))
                self._to_hide.append((owner._parameters, place, p.master))
        self._guard_calls()
        self.show(False)

    def _lay_out(self) -> None:
        """Have the whole matrices of each dtype lie side by side."""
        self._wholes: list[Tensor] = []
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # each with its bytes
        self._gathered_bytes = 0
        for same in group_by(self.sharded, lambda p: p.shown_dtype):
            shapes = [torch.Size([p.size]) for p in same]
            side_by_side = SideBySide(shapes, same[0].shown_dtype, same[0].master.device)
            whole, buffers = side_by_side.make()
            for p, buffer in zip(same, buffers, strict=True):
                p.lie_in(buffer)
                self._gathered_bytes += buffer.nbytes
            self._wholes.append(whole)
            self._storages.append((whole.untyped_storage(), whole.nbytes))

    def tell(self, moment: str) -> None:
        if self.observer is not None:
            self.observer(moment, self.name)

    def issue(self) -> None:
        """Take the memory and start the all-gather, unless that is done."""
        if self.gathered:
            return
        self.gathered = True
        for storage, size in self._storages:
            storage.resize_(size)
        self._filled = self._lane.run(self._gather)

    def _gather(self) -> None:
        self.tell("gather begins")
        self._transfer.gather()
        self.tell("gather ends")

    def wait(self) -> None:
        """Let the current stream wait for the gathered parameters."""
        self._lane.wait(self._filled)
        self._filled = None

    def wait_to_compute(self) -> None:
        """Let the current stream wait, now that it is the unit's turn; its modules have the whole
        parameters then."""
        self.tell("turn")
        self.wait()
        self.show(True)
        self.tell("computes")

    def show(self, whole: bool) -> None:
        """Let the modules have what they compute with, or the masters, if they have the other."""
        if self.shown == whole:
            return
        self.shown = whole
        for table, key, value in self._to_show if whole else self._to_hide:
            table[key] = value
        if whole:
            for attributes in self._guarded:
                attributes.pop("forward", None)

    def _guard_calls(self) -> None:
        """Have a guard take the place of each owner's ``forward`` while the masters are shown."""
        owners: dict[nn.Module, str] = {}
        for p in self.sharded:
            for owner, _ in p.places:
                owners.setdefault(owner, p.names[0])
        self._guarded: list[dict] = []  # of modules whose own forward is that of the class
        for owner, name in owners.items():
            attributes = owner.__dict__
            self._to_hide.append((attributes, "forward", self._guard(owner.forward, name)))
            if "forward" in attributes:
                self._to_show.append((attributes, "forward", attributes["forward"]))
            else:
                self._guarded.append(attributes)

    def _guard(self, compute: Callable, name: str) -> Callable:
        """Return ``compute``, but for an error where the whole of a parameter is not there."""

        def forward(*args, **kwargs):
            # A unit's own forward is looked up before the hook that shows its parameters.
            if not self.shown:
                raise RuntimeError(
                    f"a module was called past the forward of its FSDP, while this rank has rows "
                    f"alone of its {name}: call the FSDP itself, or a module with the weights of "
                    "its gather_full_params()"
                )
            return compute(*args, **kwargs)

        return forward

    def _versions_now(self) -> list[int]:
        # Those of one storage count together; the count has no public name.
        versions = [whole._version for whole in self._wholes]
        for p in self.cast:
            versions.append(p.shown._version)
        return versions

    def check_unchanged(self) -> None:
        """Raise RuntimeError where somebody wrote to what was gathered: it is freed, and the
        masters would not know."""
        versions = self._versions_now()
        if versions != self._versions:
            self._versions = versions
            self.leave_backward()
            names = ", ".join(p.names[0] for p in self.parameters)
            raise RuntimeError(
                "a gathered parameter was changed in place while its module computed (an "
                f"Embedding's max_norm does so), which FSDP would lose; it is one of {names}"
            )

    def refresh(self) -> None:
        """Write the masters' values into the cast copies."""
        if self.cast:
            with torch.no_grad():
                copy_all(self._cast_copies, self._cast_masters)

    def free(self) -> None:
        if self.gathered:
            self.wait()
            for storage, _ in self._storages:
                storage.resize_(0)
            self.gathered = False

    def gathered_bytes(self) -> int:
        """Return the bytes of the whole matrices that are there."""
        return self._gathered_bytes if self.gathered else 0

    def leave_backward(self) -> None:
        """End a backward that has made no gradients here."""
        self.in_backward = False
        self.show(False)
        self.free()

    def prepare_reduction(self) -> list[Prepared]:
        """Return the gradients as they will travel, those that are alike together. What was
        gathered, and the gradients that were cast, are dropped."""
        for p in self.cast:
            p.take_gradient()
        self.leave_backward()  # first: the casts have the room of what it frees
        return [alike.prepare(self._transfer.sends_slots) for alike in self._alike]

    def reduce(self, prepared: list[Prepared], then: Then | None) -> torch.cuda.Event | None:
        """Start the reduce-scatter of what was prepared, into the masters' gradients, and call
        ``then`` on the lane behind it with the masters that had a gradient on this rank. Nothing
        but a gather, which is on the lane too, reads them: from there on they may be written to.
        The caller keeps ``prepared`` until its end."""

        def reduce_scatter() -> None:
            self.tell("reduce begins")
            for gradients in prepared:
                self._transfer.reduce(gradients)
                for p, room in zip(gradients.alike.parameters, gradients.rooms, strict=True):
                    p.take_reduced(room)
            self.tell("reduce ends")
            if then is not None:
                # One without may have a gradient on no rank, which the finish alone knows.
                present = [p.master for p in self.sharded if p.has_gradient()]
                then(present)

        return self._lane.run(reduce_scatter)
