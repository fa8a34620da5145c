"""Checks of a wrapper at the ends of steps: its gradients are the means, its module and the other
ranks are where it is.

A step without ``finish_gradient_synchronization`` is refused: what backward writes into ``.grad``
is this rank's own, and weights that then differ between ranks look like any others. PyTorch's hooks
before and after every optimizer's step ask each wrapper, once a step. After it too: the backward of
a step's closure comes within the step.
"""

import itertools
import operator
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from a2lib.parallel.group import capturing, member

# Those whose steps are watched. A step of any torch.optim optimizer raises RuntimeError while it
# would read a gradient of ``wrapper.unfinished()``, parameters whose gradients are this rank's own,
# or once its closure has read such. Before each step ``wrapper.meet(optimizer)`` is called. A step
# that is compiled itself is not watched: it has no hooks.
wrappers: weakref.WeakSet = weakref.WeakSet()

IS_TRAINED = operator.attrgetter("requires_grad")


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _refuse(optimizer)
    if not torch.compiler.is_compiling():
        for wrapper in wrappers:
            wrapper.meet(optimizer)


def _refuse(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    for wrapper in wrappers:
        waiting = [p for p in wrapper.unfinished() if p.grad is not None]
        if waiting and not set(waiting).isdisjoint(parameters_of(optimizer.param_groups)):
            raise RuntimeError(
                f"the gradients of this {type(wrapper).__name__} are still each rank's own: call "
                "finish_gradient_synchronization() between backward and the optimizer's step"
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_refuse)


def parameters_of(groups: list[dict]) -> list:
    """Return the parameters of an optimizer's groups, in order; of saved groups their names."""
    parameters = []
    for group in groups:
        parameters.extend(group["params"])
    return parameters


class Members:
    """The parameters of a module as they were, frozen or not, and ``also`` others that may take
    their places. Who asks at each step whether they still are compares identities alone and walks
    no tree."""

    def __init__(self, module: nn.Module, also: Iterable[Tensor] = ()) -> None:
        self._module = module
        named = dict(module.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._trained = list(map(IS_TRAINED, self._parameters))
        self._allowed = {*map(id, self._parameters), *map(id, also)}
        self._remember()

    def check(self) -> None:
        """Raise RuntimeError for a parameter that came or was replaced, frozen or thawed."""
        trained = list(map(IS_TRAINED, self._parameters))
        if trained != self._trained:
            changed = list(map(operator.ne, trained, self._trained)).index(True)
            raise RuntimeError(
                f"{self._names[changed]} was frozen or thawed after it was wrapped; change "
                "requires_grad before"
            )
        # Of thousands of entries at each step: nothing here is a loop of Python's.
        if all(map(operator.is_, self._entries(), self._before)):
            return
        for name, p in self._module.named_parameters():
            if id(p) not in self._allowed:
                raise RuntimeError(
                    f"{name} came or was replaced after the module was wrapped, and its gradient is"
                    " not averaged; wrap the module anew"
                )
        self._remember()  # a module without parameters came or went

    def _remember(self) -> None:
        self._tables: list[dict] = []
        for module in self._module.modules():
            # PyTorch's public names for what is in them walk the tree.
            self._tables += [module._parameters, module._modules]
        self._before = list(self._entries())

    def _entries(self) -> Iterator[object]:
        entries = itertools.chain.from_iterable(map(dict.values, self._tables))
        return itertools.chain(entries, [self])  # an end, which one more or less would move


class Agreement:
    """One sum over the ranks at the end of a step, which tells each of them which parameters have a
    gradient on no rank, and whether all of them end the same step.

    The sum has a one for each parameter from each rank that has a gradient for it, and for each
    rank, in a place of its own, how many forwards it began since the last step. On the CPU all of
    it is read at once. On a GPU a rank that has all its gradients, which is the rule, reads nothing
    on the host, so that nothing waits and a CUDA graph can hold it; the ranks' numbers are looked
    at one step later.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._names, self._group = names, group
        rank, size = member(group)
        self._place = len(names) + rank
        self._usual = torch.zeros(len(names) + size, dtype=torch.float32, device=device)
        self._usual[: len(names)] = 1
        self._usual[self._place] = 1
        self._counts = torch.empty_like(self._usual)
        self._last: tuple[list[int], set[int]] = [], set()
        # The ranks' numbers on their way to the host, each with the event behind it.
        self._coming: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def end_step(self, missing: list[int], forwards: int) -> set[int]:
        """Return those of ``missing``, the parameters without a gradient on this rank, that no rank
        has one for; ``forwards`` is the number of this rank's. Collective.

        Raises RuntimeError on every rank, with the rank's number, where one ends another step than
        the others. In a CUDA graph's capture, which cannot read, returns what the last step found;
        RuntimeError where that was missing others.
        """
        self._counts.copy_(self._usual)
        for i in missing:
            # Not an assignment, which copies the number from the host: no capture allows that.
            self._counts[i].zero_()
        captured = capturing(self._counts.device)
        if forwards != 1 and not captured:
            self._counts[self._place].fill_(forwards)
        dist.all_reduce(self._counts, group=self._group)
        if captured:
            self._check_missing(missing)
            return self._last[1]
        if missing or not self._counts.is_cuda:
            counts = self._counts.tolist()
            _check_same_step(counts[len(self._names) :])
            self._last = missing, {i for i in missing if not counts[i]}
        else:
            self._last = [], set()
            self._look_later()
        return self._last[1]

    def _check_missing(self, missing: list[int]) -> None:
        if missing != self._last[0]:
            other = sorted({*missing} ^ {*self._last[0]})
            raise RuntimeError(
                f"{self._names[other[0]]} has a gradient in the captured step or in the one "
                "before, not in both; warm up with the step that is captured"
            )

    def _look_later(self) -> None:
        """Start to bring the ranks' numbers to the host, and look at those that have come."""
        numbers = self._counts[len(self._names) :]
        room = torch.empty(len(numbers), dtype=torch.float32, device="cpu", pin_memory=True)
        room.copy_(numbers, non_blocking=True)
        behind = torch.cuda.Event()
        behind.record()
        self._coming.append((behind, room))
        while self._coming[0][0].query():
            _, came = self._coming.popleft()
            _check_same_step(came.tolist())
            if not self._coming:
                return


def _check_same_step(forwards: list[float]) -> None:
    """Raise RuntimeError unless every rank has the same number."""
    least, most = min(forwards), max(forwards)
    if least == most:
        return
    raise RuntimeError(
        f"rank {forwards.index(most)} skipped a step, or called the wrapper for itself: it began "
        f"{most:.0f} forwards since the last step and rank {forwards.index(least)} began "
        f"{least:.0f}; every rank skips a step, or none, and a forward of some ranks alone belongs "
        "into no_grad() or no_sync()"
    )
