"""When units are gathered, freed, and their gradients sent.

Forward of unit i:   start the all-gather of i+1, wait for that of i, compute, free i.
Backward of unit i:  free i+1 and set its gradients apart, start the all-gather of i-1, start the
                     reduce-scatter of i+1, wait for the all-gather of i, compute.

The order is that in which the module has its units. Where another unit comes than the one that was
gathered ahead, that one is freed, and until the next forward each gathers for itself: no more than
one is held for nothing. A prefetch has to be queued before the kernels it hides behind: memory is
taken on the stream that computes, and the all-gather waits for that point.

Autograd runs the nodes of a device in the reverse order of their making, so a unit's backward is
done when the next one's first gradient comes, unless that is at the same node: the root returns
what its last unit did, and a block that is skipped what came in.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves  # there is none by a public name

from a2lib.parallel.copy_engines import Then
from a2lib.parallel.fsdp.units import Prepared, Unit
from a2lib.parallel.lane import Lane

# What an output may have besides tensors without hiding one.
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Schedule:
    """The order of ``units``, of which the first is the root."""

    def __init__(self, units: list[Unit], lane: Lane) -> None:
        self.units, self.root = units, units[0]
        self._lane = lane
        # What comes next in forward; and in backward, which begins with the root's.
        self._after = dict(zip(units, units[1:], strict=False))
        self._before = {self.root: units[-1], **dict(zip(units[2:], units[1:], strict=False))}
        self._ahead: Unit | None = None  # what was gathered before its turn, which has not come
        self._in_order = True  # since the last forward began, units have come as they were expected
        self._in_forward = False
        self._begun: list[Unit] = []  # backward has begun, gradients have not been sent
        # Gradients of units on their way, each with where their reduce-scatters end.
        self._sent: list[tuple[torch.cuda.Event | None, list[Prepared]]] = []
        self.then: Then | None = None  # what is called with shards whose gradients are the means
        # Since the last finish.
        self._passed_on: set[Unit] = set()  # their shards were, and may have been updated
        self._waits_for_backward = False  # a forward, which may have raised
        self.accumulated = False  # a backward has begun

    # Forward.

    def begin_forward(self) -> None:
        """Begin a forward of the whole: what is gathered may be of an earlier step.

        Raises RuntimeError where a forward has had no backward. The other ranks may be within it or
        its backward, and would take the messages of another one for theirs.
        """
        if self._waits_for_backward:
            raise RuntimeError(
                "the forward before this one has had no backward: call in no_grad() what is to "
                "have none, and where a forward or its loss raised end all processes"
            )
        self._free_all()
        for unit in self.units:
            unit.calls = 0
        self._ahead, self._in_order = None, True
        self._in_forward = True
        self._waits_for_backward = torch.is_grad_enabled()

    def before_forward(self, unit: Unit) -> None:
        """Have the unit's parameters whole, and the next one's on their way."""
        self._refuse_passed_on(unit)
        if in_backward():  # a checkpoint computes this anew
            unit.issue()
        elif self._in_forward:
            self._meet_order(unit)
            unit.issue()
            self._gather_ahead(self._after.get(unit))
        else:
            unit.free()  # called by itself: what it had may be of an earlier step
            unit.issue()
        unit.refresh()
        unit.wait_to_compute()

    def _refuse_passed_on(self, unit: Unit) -> None:
        if unit in self._passed_on:
            raise RuntimeError(
                f"{unit.name or 'the module'} computes again behind a backward within overlapping()"
                ", which may have updated its weights: call finish_gradient_synchronization() and "
                "step() first"
            )

    def _gather_ahead(self, following: Unit | None) -> None:
        if following is not None and self._in_order and not following.gathered:
            following.issue()
            self._ahead = following

    def _meet_order(self, unit: Unit | None) -> None:
        """Free what was gathered ahead unless it is this unit, whose turn has come."""
        ahead, self._ahead = self._ahead, None
        if ahead not in (None, unit):
            self._in_order = False
            ahead.free()

    def after_forward(self, unit: Unit, output: object) -> None:
        """Free the unit, unless its backward may come at once; ``before_backward`` is called when
        that does."""
        unit.check_unchanged()
        needed = self._watch(unit, output)
        if in_backward():
            return
        unit.calls += 1
        unit.show(False)
        if unit is self.root:
            self._in_forward = False
            self._meet_order(None)
            if not needed:  # no backward will come, unless the forward raised
                self._free_all()
                self._waits_for_backward &= output is None
            return
        # Backward wants the last one at once.
        is_last = self._in_order and unit is self.units[-1]
        if not (needed and is_last):
            unit.free()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.free()

    def _watch(self, unit: Unit, output: object) -> bool:
        """Have the unit's backward begin when a gradient reaches ``output``; return whether one
        can."""
        begin = functools.partial(self.before_backward, unit)
        needed = False
        for x in _tensors_in(unit, output):
            if not x.requires_grad:
                continue
            needed = True
            if x.grad_fn is None:
                x.register_hook(lambda _: begin(None))
                continue
            begin_once = _once_a_backward(begin)
            _call_before(x.grad_fn, begin_once)
            # Changed in place by the caller, a view gets another history, but not its base's, which
            # has no public name.
            if x._is_view() and x._base.grad_fn is not None:
                _call_before(x._base.grad_fn, begin_once)
        return needed

    # Backward.

    def before_backward(self, unit: Unit, mark: object) -> None:
        """Have the unit's parameters whole, and send the gradients of those that are done; ``mark``
        is that of the node at which the unit begins."""
        if torch.is_grad_enabled():  # within a backward, with create_graph alone
            raise RuntimeError(
                "FSDP has no backward of a backward, since gathered parameters are freed: call "
                "this one without create_graph"
            )
        if unit.in_backward:
            return
        self._refuse_passed_on(unit)
        self._waits_for_backward = False
        self.accumulated = True
        self._meet_order(unit)
        done: list[tuple[Unit, list[Prepared]]] = []
        still: list[Unit] = []
        for other in self._begun:
            same_node = mark is not None and other.began_at is mark
            if other is self.root or same_node:
                still.append(other)
            else:
                done.append((other, self._prepare(other)))
        if not self._begun:
            # Nothing is left behind a backward, which zero_grad could not reach. PyTorch calls this
            # at its end, and has no public name for it.
            torch.autograd.Variable._execution_engine.queue_callback(self._send_begun)
        self._begun = still
        unit.began_at, unit.in_backward = mark, True
        self._begun.append(unit)
        unit.issue()
        self._gather_ahead(self._before.get(unit))
        for other, prepared in done:
            self._send(other, prepared)
        unit.wait_to_compute()

    @torch.no_grad()
    def _send_begun(self) -> None:
        """Send the gradients of every unit whose backward was seen to begin."""
        begun, self._begun = self._begun, []
        for unit in begun:
            self._send(unit, self._prepare(unit))

    def _prepare(self, unit: Unit) -> list[Prepared]:
        """Return the unit's gradients as they will travel, once there is room for them."""
        # No more than a unit's are held at once: where a block's all-gather and reduce-scatter take
        # longer than its backward, the link is what is waited for, with one or with more.
        self._wait_for_sent()
        return unit.prepare_reduction()

    def _send(self, unit: Unit, prepared: list[Prepared]) -> None:
        if not prepared:
            return
        # A unit that was called twice may be gathered again, and send again, within this backward.
        then = self.then if unit.calls == 1 else None
        # What travels is held until the current stream has waited for it.
        self._sent.append((unit.reduce(prepared, then), prepared))
        if then is not None:
            self._passed_on.add(unit)

    # The end of a step.

    def check_no_backward_runs(self) -> None:
        """Raise RuntimeError where a backward has begun and not ended: one that raised."""
        if self._begun:
            raise RuntimeError(
                "a backward has not come to its end, and other ranks may wait for what it was to "
                "send: end all processes"
            )

    def _wait_for_sent(self) -> None:
        """Let the current stream wait for all that was sent."""
        for end, _ in self._sent:
            self._lane.wait(end)
        self._sent.clear()

    def end(self) -> None:
        """End the step: what was sent is there, and nothing is gathered any more."""
        self._wait_for_sent()
        self._passed_on.clear()
        self._waits_for_backward = self.accumulated = False
        self._in_forward, self._ahead = False, None
        self._free_all()

    def travelling_bytes(self) -> int:
        """Return the bytes of gradients whose reduce-scatters have not ended."""
        total = 0
        for _, sent in self._sent:
            for prepared in sent:
                total += sum(whole.nbytes for whole in prepared.wholes)
        return total


def _call_before(node: Node, begin: Callable) -> None:
    # The mark stands for the node, which the hook must not hold: that would be a cycle no collector
    # sees.
    mark = node.metadata.setdefault("a2lib.fsdp", object())
    node.register_prehook(lambda _: begin(mark))


def _once_a_backward(begin: Callable) -> Callable:
    """Return ``begin`` for the first of two nodes, where there are two: the base of a view may be
    what an earlier unit made, and when that comes this one is through."""
    last = None

    def begin_once(mark: object) -> None:
        nonlocal last
        number = backward_number()
        if number != last:
            last = number
            begin(mark)

    return begin_once


def _tensors_in(unit: Unit, output: object) -> list[Tensor]:
    """Return the tensors in what a unit returned; RuntimeError where some may be hidden."""
    if isinstance(output, Tensor):
        return [output]  # as most are: a tree costs the host more
    tensors = []
    for x in tree_leaves(output):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif torch.is_grad_enabled() and not isinstance(x, PLAIN):
            raise RuntimeError(
                f"{unit.name or 'the module'} returns an object in which FSDP sees no tensors, a "
                f"{type(x).__name__}: return tensors, or tuples, lists or dicts of them"
            )
    return tensors


def in_backward() -> bool:
    """Return whether autograd is running a backward here, so that a forward is a checkpoint's."""
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of the backward that autograd is running here, -1 where there is none."""
    # PyTorch has no public name for it.
    return torch._C._current_graph_task_id()
