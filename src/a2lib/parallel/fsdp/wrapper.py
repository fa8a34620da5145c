"""When parameters are gathered, freed and their gradients sent: the FSDP wrapper.

Forward of unit i:   start the all-gather of i+1, wait for that of i, compute, free i.
Backward of unit i:  free i+1 and set its gradients apart, start the all-gather of i-1, start the
                     reduce-scatter of i+1, wait for the all-gather of i, compute.

The order is that of the forward before, so the first has no prefetch. A prefetch has to be queued
before the kernels it hides behind: memory is taken on the stream that computes, and the all-gather
waits for that point. The design follows Zhao et al., arXiv 2304.11277, and PyTorch's own second
version in sharding each parameter by rows.
"""

import collections
import contextlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from a2lib.parallel.finish import watch_steps
from a2lib.parallel.fsdp.clipping import refuse_norms_of
from a2lib.parallel.fsdp.optimizers import Optimizers
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.units import Unit, by_dtype, places_of, unit_modules
from a2lib.parallel.group import (
    Agreement,
    Members,
    Step,
    capturing,
    make_alike,
    mean_coalesced,
    member,
)
from a2lib.parallel.lane import Lane
from a2lib.parallel.meeting import Meeting

# Reduce-scatters whose inputs are held at once. Where a block's all-gather and reduce-scatter take
# longer than its backward the link is what is waited for, with one or with more.
IN_FLIGHT = 1
# Normalisations whose kernels on a GPU take inputs and parameters of one dtype.
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# What an output may have besides tensors without hiding one.
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class FSDP(nn.Module):
    """``module`` with each parameter of two or more dimensions divided over the ranks by rows.

        fsdp = FSDP(module, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(fsdp.parameters())
        loss(fsdp(x), y).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()

    ``parameters()`` are this rank's rows and the whole of what has fewer dimensions, float32 where
    the module had 16 bits. They are the module's own parameter objects, changed in place. A rank
    may have no rows; row counts that the world does not divide are padded on the way.

    ``compute_dtype`` is the dtype of the matrices while the module computes, cast before they are
    gathered; floating inputs of units and of modules that own a matrix are cast to it too, and so
    are those modules' biases. Other parameters, such as a norm's, keep their dtype; the inputs of
    torch.nn's LayerNorm, RMSNorm and GroupNorm are cast to it. None computes in each parameter's
    own dtype. Gradients travel and arrive in the masters' dtype.

    A unit (``units.unit_modules``) is gathered as a whole: a module without ModuleList or
    Sequential is one. All else, the root, stays gathered from its forward to the end of backward.
    Activation checkpoints may be around units or inside, reentrant or not. ``torch.compile`` the
    units before wrapping, never the whole.

    Every rank must run the same units in the same order; within a unit, a parameter may be without
    a gradient on some ranks (it counts as zero) or on all (``.grad`` stays None). Several backwards
    may come before one finish: each is reduce-scattered, and the sum is kept in shards.

    With two ranks and one backward a step, the weights equal to the bit those of one process that
    adds the ranks' gradients in order, and casts alike. Of several backwards, matrices add the
    means and the rest takes the mean of the sums. With more ranks the order is the backend's.

    What is read by PyTorch's names is whole, or refused. ``state_dict`` of the module, of a part
    of it and of an optimizer that works element by element are of whole parameters, and what
    ``load_state_dict`` takes is whole; both are collective. Refused, with RuntimeError or
    ValueError, are an optimizer that looks at whole matrices or at all parameters (Muon, LBFGS,
    Adafactor), torch's norm of gradients (use ``clip_grad_norm_`` of this class), a module that is
    called past the forward of its unit (``module.head(x)``, a ``generate`` that calls
    ``self.forward``: be within ``gathered()``), a write to a gathered parameter (``max_norm`` of
    an Embedding), a parameter that came or was replaced later, an optimizer's step without the
    finish, and a backward with ``create_graph``: there is no backward of a backward. What is left
    to the reader are ``parameters()``, and ``module.head.weight`` outside of ``gathered()``: rows.

    A hook that a user registers on a parameter never has the mean: gradients come to the gathered
    or the cast one, and what is neither has this rank's own. Change ``.grad`` after the finish.
    What a unit computes for the loss has to be in what it returns: backward of a tensor that it
    keeps in an attribute may begin before its parameters are gathered. An LSTM's or GRU's weights
    are not flattened: cuDNN copies them at each call and says so. Of a GradScaler each rank looks
    at its own rows: take a step only where the norm, which is over all, is finite.
    ``save_sharded`` and ``load_sharded`` keep a training, for any number of ranks.

    Raises RuntimeError without a process group or for a module that is wrapped already, ValueError
    for modules that differ between ranks, several devices, a meta module, or a compute_dtype that
    is not floating.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype must be a floating dtype or None; got {compute_dtype}")
        self.rank, self.world_size = member(group)
        if any(m in _wrapped for m in module.modules()):
            raise RuntimeError("this module, or a part of it, is in an FSDP already")
        self.device = make_alike(module, group)
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        self._lane = Lane(self.device)
        self._shard()
        self._step = Step()
        self._meeting = Meeting(group)
        self._waits_for_backward = False  # a forward with gradients has begun, and no backward
        self._held_whole = False  # within gathered()
        # The backward that was seen last, and whether it adds to gradients of parameters.
        self._backward, self._accumulates = -1, False
        # Units in the order of the last forward, and how far this forward has followed it.
        self._order: list[Unit] = []
        self._current: list[Unit] = []
        self._position: int | None = None
        self._in_forward = False
        self._begun: list[Unit] = []  # backward has begun, gradients have not been sent
        self._unseen: list[Unit] = []
        self._root_reduced = False  # since the last finish
        self._sent: collections.deque = collections.deque()
        self._cast_inputs = _caster(compute_dtype) if compute_dtype else None
        self._hook_modules()
        self._hook_state_dicts()
        for unit in self._units:
            unit.module._fsdp = _NoCopies()
        _wrapped.update(module.modules())
        watch_steps(self)
        if self.world_size > 1:
            refuse_norms_of([p for p in self._parameters_in_order if isinstance(p, Sharded)])

    def forward(self, *args, **kwargs):
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            self._name_who_left(error)
            raise

    def finish_gradient_synchronization(self) -> None:
        """Make each ``.grad`` the mean over the ranks, of this rank's rows or of the whole; every
        rank calls it once a step. The host does not wait on CUDA.

        Raises RuntimeError where a parameter came, was replaced, frozen or thawed after it was
        wrapped, after a backward that raised, and, on every rank, where one began other forwards
        since the last step than the rest.
        """
        try:
            self._finish()
        except RuntimeError as error:
            self._name_who_left(error)
            raise

    @torch.no_grad()
    def _finish(self) -> None:
        for unit in self._units:
            if not unit.in_backward:
                unit.show(False)
        self._check_parameters()
        self._check_backward()
        # Every rank reduces the root, also one on which its backward could not be seen.
        if self._root not in self._begun and not self._root_reduced:
            self._begun.append(self._root)
        self._accumulates = True
        self._reduce_begun()
        self._root_reduced = False
        for p in self._replicated:
            p.take_gradient()
        while self._sent:
            self._lane.wait(self._sent.popleft()[0])
        forwards = self._step.forwards
        self._step.clear()
        self._waits_for_backward = False
        self._average_replicated_and_drop_unused(forwards)
        for unit in self._units:
            unit.free()
            unit.show(False)

    def unfinished(self) -> list[nn.Parameter]:
        """Return the parameters, while a backward waits for the finish."""
        if self._step.accumulated or self._unseen:
            return [p.master for p in self._trained]
        return []

    def reset(self) -> None:
        """Forget what forwards and backwards have left since the last finish, after one that raised
        half way or for a step that is not to be taken; ``zero_grad`` does the rest. Every rank
        calls it: RuntimeError where others do not within ``meeting.LIMIT_S``."""
        while self._sent:
            self._lane.wait(self._sent.popleft()[0])
        for unit in self._units:
            unit.forget()
        self._begun, self._unseen = [], []
        self._in_forward = self._root_reduced = self._waits_for_backward = False
        self._step.clear()
        self._meeting.meet()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have every parameter whole within it, in the dtype that the module computes with, for
        what goes past its forward: ``module.generate``, ``module.head.weight``. Collective, and
        without gradients; RuntimeError for a forward that would have some, and at the end where a
        parameter was changed in place."""
        if self._held_whole:
            yield
            return
        with torch.no_grad():
            self._begin()
            self._in_forward = False
            for unit in self._units:
                unit.issue()
                unit.refresh()
                unit.wait_to_compute()
            self._held_whole = True
            try:
                yield
            finally:
                self._held_whole = False
                for unit in self._units:
                    unit.show(False)
                    unit.free()
            for unit in self._units:
                unit.check_unchanged()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in its master's dtype, by its name in the module; a tied weight
        under each of its names. New tensors, on every rank; collective."""
        result = {}
        for p in self._parameters_in_order:
            whole = self._whole(p)
            for name in p.names:
                result[name] = whole
        return result

    def _whole(self, p: Sharded | Replicated) -> Tensor:
        master = p.master.detach()
        return p.gather(master, self.group) if isinstance(p, Sharded) else master.clone()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most ``max_norm``; returns
        the norm before, as torch's function of that name; RuntimeError before the finish.
        Collective."""
        if self.unfinished():
            raise RuntimeError("clip_grad_norm_ comes after finish_gradient_synchronization")
        squares = [torch.zeros((), device=self.device) for _ in range(2)]
        given = [p for p in self._parameters_in_order if p.master.grad is not None]
        for p in given:
            grad = p.master.grad
            grad = torch.view_as_real(grad) if grad.is_complex() else grad.float()
            squares[isinstance(p, Sharded)] += grad.square().sum()
        dist.all_reduce(squares[True], group=self.group)
        norm = (squares[False] + squares[True]).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in given:
            p.master.grad.mul_(scale.to(p.master.grad.dtype))
        return norm

    def observe(self, observer: Callable[[str, str], object] | None) -> None:
        """Have ``observer(moment, unit)`` called at each of ``MOMENTS`` (``units``) of each unit, a
        module's name, "" for the root; within the stream that the moment is of. None ends it."""
        for unit in self._units:
            unit.observer = observer

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds: its "parameters", their "gradients", what is "gathered", and
        "travelling", the gradients of whole units before their reduce-scatters have ended."""
        held = dict.fromkeys(("parameters", "gradients", "gathered", "travelling"), 0)
        for p in self._parameters_in_order:
            held["parameters"] += p.master.nbytes
            held["gradients"] += 0 if p.master.grad is None else p.master.grad.nbytes
            if p.shown is not p.master:
                held["gathered"] += p.shown.nbytes if isinstance(p, Replicated) else 0
                held["travelling"] += 0 if p.shown.grad is None else p.shown.grad.nbytes
        held["gathered"] += sum(unit.gathered_bytes() for unit in self._units)
        on_the_way = (one for _, sent in self._sent for one in sent)
        held["travelling"] += sum(x.nbytes for one in on_the_way for x in one.wholes)
        return held

    def _shard(self) -> None:
        places = places_of(self.module)
        owners = {m for p, (_, at) in places.items() if p.dim() >= 2 for m, _ in at}
        inner = unit_modules(self.module)
        modules = {"": self.module, **inner}
        units_of: dict[nn.Module, set[str]] = {}
        for name, module in inner.items():
            for m in module.modules():
                units_of.setdefault(m, set()).add(name)
        held: dict[str, tuple[list[Sharded], list[Replicated]]] = {n: ([], []) for n in modules}
        self._parameters_in_order: list[Sharded | Replicated] = []
        for p, (names, at) in places.items():
            homes = set().union(*(units_of.get(m, {""}) for m, _ in at))
            sharded, cast = held[homes.pop() if len(homes) == 1 else ""]
            computes = p.dtype
            # A float of 8 bits goes with a scale that its module knows of.
            casts = self.compute_dtype and p.is_floating_point() and p.dtype.itemsize > 1
            if casts and any(m in owners for m, _ in at):
                computes = self.compute_dtype
            p.grad = None
            if p.dim() >= 2 and p.numel():
                one = Sharded(names, p, computes, at, self.rank, self.world_size)
                sharded.append(one)
            else:
                one = Replicated(names, p, computes, at)
                if one.shown is not p:
                    cast.append(one)
            self._parameters_in_order.append(one)
        self._replicated = [p for p in self._parameters_in_order if isinstance(p, Replicated)]
        self._units = [
            Unit(name, module, *held[name], self._lane, self.group)
            for name, module in modules.items()
        ]
        self._root = self._units[0]
        self._owners = owners
        self._trained = [p for p in self._parameters_in_order if p.master.requires_grad]
        self._trains = set(self._trained)
        self._agreement = Agreement([p.names[0] for p in self._trained], self.device, self.group)
        self._members = Members(self.module, [p.shown for p in self._parameters_in_order])
        sharded = [p for p in self._parameters_in_order if isinstance(p, Sharded)]
        self._optimizers = Optimizers(sharded, self.group)

    def _hook_modules(self) -> None:
        def hook(function: Callable, *first: object) -> Callable:
            # Not to be traced into a compiled block: what they do changes from call to call.
            return torch.compiler.disable(lambda *rest: function(*first, *rest))

        for unit in self._units:
            # First of all: others, such as weight_norm's, may read parameters.
            unit.module.register_forward_pre_hook(
                hook(self._before, unit), with_kwargs=True, prepend=True
            )
            unit.module.register_forward_hook(hook(self._after, unit), always_call=True)
        for module in self.module.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU its first forward would move the whole weights, for good, to one block.
                module.flatten_parameters = lambda: None
        if self._cast_inputs:
            # These are traced: they stand in the middle of a block.
            for owner in self._owners - {unit.module for unit in self._units}:
                owner.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
            for norm in set(self.module.modules()) - self._owners:
                if isinstance(norm, NORMS) and norm.weight is not None:
                    norm.register_forward_pre_hook(_caster(None), with_kwargs=True)

    def _hook_state_dicts(self) -> None:
        """Have ``state_dict`` of the module, or of a part of it, return whole parameters, and
        ``load_state_dict`` take them."""
        held: dict[nn.Module, dict[str, Sharded | Replicated]] = {}
        for p in self._parameters_in_order:
            for owner, name in p.places:
                if p.shown is not p.master:
                    held.setdefault(owner, {})[name] = p
        for owner, parameters in held.items():
            owner.register_state_dict_post_hook(self._state_saver(parameters))
            owner.register_load_state_dict_pre_hook(_state_loader(parameters))

    def _state_saver(self, parameters: dict[str, Sharded | Replicated]) -> Callable:
        @torch.no_grad()
        def gather(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
            for name, p in parameters.items():
                state[prefix + name] = self._whole(p)

        return gather

    # Forward.

    def _before(
        self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        if self._held_whole:
            if torch.is_grad_enabled():
                raise RuntimeError("within gathered() a module computes without gradients")
            return self._cast_inputs(module, args, kwargs) if self._cast_inputs else None
        again = _in_backward()  # a checkpoint computes this anew
        if not again:
            if unit is self._root:
                self._begin()
            elif not self._in_forward:
                unit.free()  # called by itself: what it had may be of an earlier step
        unit.issue()
        if not again:
            self._prefetch(unit)
        unit.refresh()
        unit.wait_to_compute()
        return self._cast_inputs(module, args, kwargs) if self._cast_inputs else None

    def _begin(self) -> None:
        """A new forward of the whole: what is gathered may be of an earlier step."""
        self._check_backward()
        self._members.check()
        if self._waits_for_backward:
            self._meeting.meet()  # the last forward was left, which the others may be in
        self._accumulates = True
        self._reduce_begun()
        for unit in self._units:
            unit.free()
        self._waits_for_backward = torch.is_grad_enabled() and not capturing(self.device)
        if self._waits_for_backward:
            self._step.forwards += 1
        self._current, self._position = [], 0
        self._in_forward = True

    def _prefetch(self, unit: Unit) -> None:
        if unit is not self._root:
            self._current.append(unit)
            if self._position is None:
                return
            if self._order[self._position : self._position + 1] != [unit]:
                self._position = None  # another way than last time: each gathers for itself
                return
            self._position += 1
        for following in self._order[self._position : self._position + 1]:
            following.issue()

    def _after(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        if self._held_whole:
            return
        unit.check_unchanged()
        needed = self._watch(unit, output)
        if _in_backward():
            return
        if torch.is_grad_enabled() and _opaque(output):
            # Its backward cannot be seen coming: it stays, and is reduced at the finish.
            self._unseen.append(unit)
            needed = True
        unit.show(False)
        # Backward wants the last one at once.
        last = self._position == len(self._order) and self._order[-1:] == [unit]
        if unit is self._root:
            self._in_forward = False
            self._order = self._current
            # Gathered ahead and not used, or kept for a backward that will not come.
            if not needed:
                for other in self._units:
                    other.free()
        elif not (needed and last) and unit not in self._unseen:
            unit.free()

    def _watch(self, unit: Unit, output: object) -> bool:
        """Have ``_before_backward`` called when a gradient reaches ``output``; whether one can."""
        leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]

        def at(node: object) -> Callable:
            # Of the node, which the hook must not hold: that would be a cycle no collector sees.
            mark = node.metadata.setdefault("a2lib.fsdp", object()) if node else None

            def begins(*_: object) -> None:
                if torch.is_grad_enabled():  # within a backward, with create_graph alone
                    raise RuntimeError(
                        "FSDP has no backward of a backward, since gathered parameters are freed: "
                        "call this one without create_graph"
                    )
                try:
                    self._before_backward(unit, mark)
                except RuntimeError as error:
                    self._name_who_left(error)
                    raise

            return begins

        for x in tensors:
            if x.grad_fn is None:
                x.register_hook(at(None))
                continue
            x.grad_fn.register_prehook(at(x.grad_fn))
            # Changed in place by the caller, a view gets another history, but not its base's.
            if x._is_view() and x._base.grad_fn is not None:
                x._base.grad_fn.register_prehook(at(x._base.grad_fn))
        return bool(tensors)

    # Backward. Autograd runs the nodes of a device in the reverse order of their making, so a
    # unit is done when the next one's first gradient comes, unless that is at the same node: the
    # root returns what its last unit did, and a block that is skipped what came in.

    @torch.no_grad()
    def _before_backward(self, unit: Unit, mark: object) -> None:
        if unit.in_backward:
            return
        self._waits_for_backward = False
        self._meet_backward(unit)
        done = [
            other
            for other in self._begun
            if other is not self._root and (mark is None or other.began_at is not mark)
        ]
        prepared = [(other, self._prepare(other)) for other in done]
        self._begun = [other for other in self._begun if other not in done]
        unit.began_at = mark
        if unit is self._root:
            # Nothing is left behind a backward, which zero_grad could not reach.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce_begun)
        unit.in_backward = True
        self._begun.append(unit)
        unit.issue()
        if (before := self._one_before(unit)) is not None:
            before.issue()
        for other, gradients in prepared:
            self._send(other, gradients)
        unit.wait_to_compute()

    def _meet_backward(self, unit: Unit) -> None:
        """Ask of a backward that is new whether it adds to gradients of parameters: that of
        ``torch.autograd.grad`` does not, and leaves nothing to send."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            parameters = itertools.chain(unit.parameters, self._trained)
            self._accumulates = any(map(_accumulates, parameters))
        if self._accumulates:
            self._step.accumulated = True

    def _one_before(self, unit: Unit) -> Unit | None:
        order = self._order
        if unit is self._root:
            return order[-1] if order else None
        if order.count(unit) != 1 or order[0] is unit:
            return None
        return order[order.index(unit) - 1]

    @torch.no_grad()
    def _reduce_begun(self) -> None:
        begun = list(dict.fromkeys([*self._begun, *self._unseen]))
        self._begun, self._unseen = [], []
        self._root_reduced |= self._root in begun and self._accumulates
        for unit in begun:
            self._send(unit, self._prepare(unit))

    def _prepare(self, unit: Unit) -> list:
        """The unit's gradients as they will travel, once there is room for them."""
        if not self._accumulates:
            unit.leave_backward()
            return []
        while len(self._sent) >= IN_FLIGHT:
            self._lane.wait(self._sent.popleft()[0])
        return unit.prepare_reduction()

    def _send(self, unit: Unit, prepared: list) -> None:
        if not prepared:
            return
        # What travels is held until the current stream has waited for it.
        self._sent.append((unit.reduce(prepared), prepared))

    # The finish.

    def _average_replicated_and_drop_unused(self, forwards: int) -> None:
        missing = [i for i, p in enumerate(self._trained) if not p.has_gradient()]
        replicated = [p for p in self._trained if isinstance(p, Replicated)]
        for p in replicated:
            p.fill_gradient()
        for same in by_dtype(replicated, lambda p: p.master.dtype):
            mean_coalesced([p.master.grad for p in same], self.group)
        unused = self._agreement.end_step(missing, forwards)
        for i, p in enumerate(self._trained):
            p.settle(unused=i in unused)

    def _check_parameters(self) -> None:
        self._members.check()
        for p in self._parameters_in_order:
            if p.master.requires_grad != (p in self._trains):
                raise RuntimeError(
                    f"{p.names[0]} was frozen or thawed after it was wrapped; change requires_grad "
                    "before"
                )

    def _check_backward(self) -> None:
        # The end of a backward takes the root out.
        if self._root in self._begun:
            problem = "a backward has not come to its end"
            self._meeting.tell(f"rank {self.rank} gave up a step: {problem} there")
            raise RuntimeError(f"{problem}; call reset(), and zero_grad() of the optimizer")

    def _name_who_left(self, error: RuntimeError) -> None:
        """Raise RuntimeError with what a rank has told that is not there any more."""
        if isinstance(error, dist.DistError) or re.search("(?i)connection|timed out", str(error)):
            if notes := self._meeting.notes():
                raise RuntimeError(notes) from error

    def _apply(self, fn, recurse=True):
        raise RuntimeError("change the dtype or the device of a module before it is wrapped")

    def __getstate__(self):
        raise TypeError("an FSDP cannot be copied or pickled; use gather_full_params()")


class _NoCopies:
    """In a wrapped module, whose copy would have its hooks, and so gather the original."""

    def __reduce_ex__(self, protocol):
        raise TypeError("a module in an FSDP cannot be copied or pickled; use gather_full_params()")


def _caster(dtype: torch.dtype | None) -> Callable:
    """A pre-hook that casts a module's floating inputs, to its weight's dtype if None is given."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        to = dtype or module.weight.dtype

        def cast(x: object) -> object:
            return x.to(to) if isinstance(x, Tensor) and x.is_floating_point() else x

        def cast_all(x: object) -> object:
            return cast(x) if isinstance(x, Tensor) else tree_map(cast, x)

        return tuple(map(cast_all, args)), {name: cast_all(x) for name, x in kwargs.items()}

    return hook


def _state_loader(parameters: dict[str, Sharded | Replicated]) -> Callable:
    @torch.no_grad()
    def take_rows(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
        for name, p in parameters.items():
            whole = state.get(prefix + name)
            if not isinstance(whole, Tensor) or isinstance(p, Replicated):
                continue
            if whole.shape != p.shape:
                raise RuntimeError(
                    f"{prefix}{name} is {tuple(p.shape)} as a whole, which load_state_dict takes; "
                    f"got {tuple(whole.shape)}"
                )
            state[prefix + name] = p.rows_of(whole)

    return take_rows


def _opaque(output: object) -> bool:
    """Whether there may be tensors in it that cannot be seen."""
    if isinstance(output, Tensor):
        return False
    return not all(isinstance(x, (Tensor, *PLAIN)) for x in tree_leaves(output))


def _accumulates(p: Sharded | Replicated) -> bool:
    """Whether the backward that runs will add to the parameter's gradient."""
    if not p.master.requires_grad:
        return False
    try:
        # PyTorch has no public name for it.
        return torch._C._will_engine_execute_node(get_gradient_edge(p.shown).node)
    except RuntimeError:
        return False  # it is what torch.autograd.grad was asked for


def _in_backward() -> bool:
    """Whether autograd is running a backward here, so that a forward is a checkpoint's."""
    return torch._C._current_graph_task_id() != -1
