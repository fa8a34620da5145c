"""The FSDP wrapper: ``schedule`` has when parameters are gathered, freed and gradients sent.

The design follows Zhao et al., arXiv 2304.11277, and PyTorch's own second version in sharding each
parameter by rows.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # there is none by a public name

from a2lib.parallel.agreement import Agreement, Members, wrappers
from a2lib.parallel.copy_engines import SharedMemory, Then, choose
from a2lib.parallel.fsdp.division import Division, divide
from a2lib.parallel.fsdp.refusals import Optimizers, refuse_norms_of, refuse_state_dicts
from a2lib.parallel.fsdp.schedule import Schedule, in_backward
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.fsdp.transfers import shared_bytes
from a2lib.parallel.fsdp.units import Unit
from a2lib.parallel.group import Mean, make_alike, member
from a2lib.parallel.lane import Lane
from a2lib.parallel.tensors import group_by

# Normalisations whose kernels on a GPU take inputs and parameters of one dtype.
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class FSDP(nn.Module):
    """Shard each floating parameter of two or more dimensions by rows over the ranks (ZeRO-3).

        fsdp = FSDP(module, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(fsdp.parameters())
        loss(fsdp(x), y).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()

    Each rank keeps its rows of every matrix, with their gradients and their optimizer state. The
    matrices of a unit, a block for example, are gathered before the unit computes and freed after
    it. The backward gathers them again, and reduce-scatters their gradients. Other parameters, such
    as norm weights and frozen integers, are whole on every rank. Sources: Rajbhandari et al., 2020;
    Zhao et al., 2023.

    Arguments:

    - ``module`` is changed in place. Its parameters stay the same objects and become this rank's
      rows, of which a rank may have none. 16-bit parameters become float32 master weights.
    - ``compute_dtype`` is the dtype in which the module computes, bfloat16 for example. Matrices
      are cast to it before they are gathered. Floating inputs of units and of modules that own a
      matrix are cast too, as are those modules' biases. Other parameters, such as a norm's, keep
      their dtype, and the inputs of torch.nn's LayerNorm, RMSNorm and GroupNorm are cast. With None
      each parameter computes in its own dtype. Gradients are reduced in the masters' dtype.
    - ``group`` is a process group, by default that of all ranks.
    - ``communication`` is how units travel; the attribute of that name is the one taken.
      "backend" is the all-gathers and reduce-scatters of NCCL or gloo. "copy_engines" needs GPUs of
      one host that reach each other's memory: matrices are copied from there, and gradients are
      sent in the dtype that backward makes them in and added in float32, in rank order. It takes
      the memory of (N - 1) / N of the largest unit, for N ranks. "auto" is copy engines where they
      can, else the backend; ``why_backend`` says why.

    Units: the elements of an outermost ModuleList or Sequential are units if they own a matrix. All
    else is the root, which stays gathered from its forward to the end of the backward. Activation
    checkpoints may be around units or inside them. Use ``torch.compile`` on the units before
    wrapping, never on the whole module.

    Training: every rank runs the same units in the same order. A parameter that has a gradient on
    some ranks only counts as zero on the others. One without a gradient on every rank keeps
    ``.grad`` None. Several forwards with their backwards may come before one finish; each backward
    reduce-scatters its gradients. With two ranks and one backward per step the weights equal, to
    the bit, those of one process that adds the ranks' gradients in order.
    ``MasterAdamW.overlapping(fsdp)`` of ``a2lib.optim`` updates a unit's rows while the gradients
    of later units are on their way; a forward or a backward between it and the finish raises
    RuntimeError.

    Whole weights: ``module.head.weight`` is rows, and ``gather_full_params`` has every parameter
    whole, for a plain module that generates text for example. ``save_sharded`` and ``load_sharded``
    keep a training on disk, for any number of ranks.

    RuntimeError or ValueError is raised for each of these:

    - ``state_dict`` and ``load_state_dict`` of the module, of a part that has rows, and of an
      optimizer over them, unless there is one rank;
    - an optimizer that looks at whole matrices or at all parameters (Muon, LBFGS, Adafactor);
    - torch's norm of gradients: use ``clip_grad_norm_`` of this class;
    - a call of a part of the module, such as ``module.head(x)``;
    - a forward after one that raised, or that records gradients and has had no backward;
    - a write to a gathered parameter, as an Embedding with ``max_norm`` does;
    - a parameter that was added, replaced, frozen or thawed after wrapping;
    - a unit that returns another object than tensors and tuples, lists or dicts of them;
    - an optimizer's step without the finish, and a backward with ``create_graph``.

    Limits that are not checked:

    - A hook on a parameter does not see the mean gradient. Change ``.grad`` after the finish.
    - What a unit computes for the loss has to be in what the unit returns.
    - The weights of an LSTM or GRU are not flattened.
    - A GradScaler looks at this rank's rows alone. Take a step only where the norm of
      ``clip_grad_norm_``, which is over all ranks, is finite.

    Raises RuntimeError without a process group. Raises ValueError for modules that differ between
    ranks, contain an FSDP, train complex parameters, are on several devices or on meta, for a
    ``compute_dtype`` that is not floating, and for "copy_engines" where they cannot.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        communication: str = "backend",
    ) -> None:
        super().__init__()
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype must be a floating dtype or None; got {compute_dtype}")
        self.rank, self.world_size = member(group)
        self.device = make_alike(module, group)
        self.module, self.group = module, group
        self.communication, self.why_backend = choose(communication, group, self.device)
        division = divide(module, compute_dtype, self.rank, self.world_size)
        self._parameters_in_order = division.parameters
        self._sharded: list[Sharded] = []
        self._replicated: list[Replicated] = []
        self._trained: list[Sharded | Replicated] = []
        self._trained_masters: list[nn.Parameter] = []
        trained_whole, trained_names = [], []
        for p in division.parameters:
            if isinstance(p, Sharded):
                self._sharded.append(p)
            else:
                self._replicated.append(p)
                if p.master.requires_grad:
                    trained_whole.append(p)
            if p.master.requires_grad:
                self._trained.append(p)
                self._trained_masters.append(p.master)
                trained_names.append(p.names[0])
        self._replicated_alike = group_by(trained_whole, lambda p: p.master.dtype)
        self._shared: SharedMemory | None = None
        if self.communication == "copy_engines":
            needed = []
            for of_unit in division.of_unit.values():
                needed.append(shared_bytes(of_unit, self.world_size))
            self._shared = SharedMemory(max(needed), group, self.device)
        lane = Lane(self.device)
        self._units: list[Unit] = []
        for name, of_unit in division.of_unit.items():
            unit = Unit(name, division.modules[name], of_unit, lane, group, self._shared)
            self._units.append(unit)
        self._schedule = Schedule(self._units, lane)
        # What is asked of the module, of optimizers and of the other ranks.
        self._members = Members(module, map(operator.attrgetter("shown"), division.parameters))
        # A rank that is alone has all rows.
        divided = self._sharded if self.world_size > 1 else []
        refuse_norms_of(divided)
        refuse_state_dicts(divided)
        self._optimizers = Optimizers(divided)
        self._agreement = Agreement(trained_names, self.device, group)
        self._mean = Mean(group)
        self._cast_inputs = _caster(compute_dtype) if compute_dtype else None
        for unit in self._units:
            self._hook_unit(unit)
        self._hook_parts(division)
        for part in {*division.modules.values(), *division.owners}:
            part._fsdp = _NoCopies()
        wrappers.add(self)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Average the gradients over the ranks; every rank calls it once a step.

        Each ``.grad`` becomes the mean: this rank's rows of it, or the whole where the parameter is
        whole. The host does not wait for the GPU.

        Raises RuntimeError where a parameter was added, replaced, frozen or thawed after
        wrapping, and after a backward that raised.
        """
        self._schedule.check_no_backward_runs()
        for unit in self._units:
            unit.show(False)
        self._members.check()
        for p in self._replicated:
            p.take_gradient()
        self._schedule.end()
        self._average_replicated_and_drop_unused()

    @contextlib.contextmanager
    def each_mean(self, then: Then) -> Iterator[None]:
        """Within it each unit whose gradients leave during backward has ``then(shards)`` called,
        once their ``.grad`` are the means, on the stream where they become so. Work that ``then``
        queues elsewhere, the caller waits for.

        Without a call are parameters that are whole on every rank, those without a gradient on this
        rank, which may have none on any, and units that the forward has called more than once.
        """
        before, self._schedule.then = self._schedule.then, then
        try:
            yield
        finally:
            self._schedule.then = before

    def unfinished(self) -> list[nn.Parameter]:
        """Return the parameters, while a backward waits for the finish."""
        return self._trained_masters if self._schedule.accumulated else []

    def meet(self, optimizer: Optimizer) -> None:
        """Refuse the state dict of an optimizer over these parameters from now on; ValueError for
        one that needs whole matrices."""
        self._optimizers.meet(optimizer)

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Return every parameter whole, in its master's dtype, by its name in the module; a tied
        weight under each of its names. New tensors, on every rank; collective."""
        wholes = {}
        for p in self._parameters_in_order:
            whole = p.whole(self.group)
            for name in p.names:
                wholes[name] = whole
        return wholes

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most ``max_norm``.

        Returns the norm before that, a scalar tensor, as torch's function of that name does. Every
        rank calls it. Raises RuntimeError before the finish.
        """
        if self.unfinished():
            raise RuntimeError("clip_grad_norm_ comes after finish_gradient_synchronization")
        of_rows = self._sum_of_squares(self._sharded)
        dist.all_reduce(of_rows, group=self.group)
        norm = (self._sum_of_squares(self._replicated) + of_rows).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in self._parameters_in_order:
            if p.master.grad is not None:
                p.master.grad.mul_(scale.to(p.master.grad.dtype))
        return norm

    def _sum_of_squares(self, parameters: list[Sharded] | list[Replicated]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for p in parameters:
            grad = p.master.grad
            if grad is not None:
                total = total + torch.linalg.vector_norm(grad).square()  # in float64 if one is
        return total

    def observe(self, observer: Callable[[str, str], object] | None) -> None:
        """Have ``observer(moment, unit)`` called at each of ``MOMENTS`` (``units``) of each unit, a
        module's name, "" for the root; within the stream that the moment is of. None ends it."""
        for unit in self._units:
            unit.observer = observer

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds.

        - "parameters": its masters, and "gradients", theirs;
        - "gathered": whole matrices and cast copies;
        - "travelling": gradients of whole units, until their reduce-scatters have ended;
        - "shared": memory of copy engines, for the life of the wrapper, which is not of PyTorch's
          caching allocator.
        """
        held = {"parameters": 0, "gradients": 0, "gathered": 0, "travelling": 0, "shared": 0}
        if self._shared is not None:
            held["shared"] = self._shared.mine.nbytes
        for p in self._parameters_in_order:
            held["parameters"] += p.master.nbytes
            held["gradients"] += _bytes(p.master.grad)
            if p.shown is not p.master:
                held["travelling"] += _bytes(p.shown.grad)
                if isinstance(p, Replicated):
                    held["gathered"] += p.shown.nbytes
        for unit in self._units:
            held["gathered"] += unit.gathered_bytes()
        held["travelling"] += self._schedule.travelling_bytes()
        return held

    # Hooks.

    def _hook_unit(self, unit: Unit) -> None:
        # Not to be traced into a compiled block: what they do changes from call to call.
        @torch.compiler.disable
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if unit is self._schedule.root and not in_backward():
                self._schedule.check_no_backward_runs()
                self._members.check()
                self._schedule.begin_forward()
            self._schedule.before_forward(unit)
            return self._cast_inputs(module, args, kwargs) if self._cast_inputs else None

        @torch.compiler.disable
        def after(module: nn.Module, args: tuple, output: object) -> None:
            self._schedule.after_forward(unit, output)

        # First of all: others, such as weight_norm's, may read parameters.
        unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        unit.module.register_forward_hook(after, always_call=True)

    def _hook_parts(self, division: Division) -> None:
        """Have inputs cast, and cuDNN leave the weights where they are."""
        units = set(division.modules.values())
        for module in self.module.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU its first forward would move the whole weights, for good, to one block.
                module.flatten_parameters = lambda: None
            if not self._cast_inputs:
                continue
            # These are traced: they stand in the middle of a block.
            if module in division.owners:
                if module not in units:
                    module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
            elif isinstance(module, NORMS) and module.weight is not None:
                module.register_forward_pre_hook(_caster(None), with_kwargs=True)

    # The finish.

    def _average_replicated_and_drop_unused(self) -> None:
        missing = [i for i, p in enumerate(self._trained) if not p.has_gradient()]
        for same in self._replicated_alike:
            for p in same:
                p.fill_gradient()
            for work in self._mean([p.master.grad for p in same]):
                work.wait()
        # Where one rank takes other steps than the rest their gathers do not meet.
        unused = self._agreement.end_step(missing, forwards=1)
        for i, p in enumerate(self._trained):
            p.settle(unused=i in unused)

    def _apply(self, fn, recurse=True):
        raise RuntimeError("change the dtype or the device of a module before it is wrapped")

    def __getstate__(self):
        raise TypeError("an FSDP cannot be copied or pickled; use gather_full_params()")


class _NoCopies:
    """In a wrapped module, whose copy would have its hooks, and so gather the original."""

    def __reduce_ex__(self, protocol):
        raise TypeError("a module in an FSDP cannot be copied or pickled; use gather_full_params()")


def _caster(dtype: torch.dtype | None) -> Callable:
    """Return a pre-hook that casts a module's floating inputs to ``dtype``; to that of its weight
    where ``dtype`` is None."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        to = dtype or module.weight.dtype

        def cast(x: object) -> object:
            return x.to(to) if isinstance(x, Tensor) and x.is_floating_point() else x

        def cast_all(x: object) -> object:
            # As most are: a tree costs the host more.
            return cast(x) if isinstance(x, Tensor) else tree_map(cast, x)

        return tuple(map(cast_all, args)), {name: cast_all(x) for name, x in kwargs.items()}

    return hook


def _bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.nbytes
