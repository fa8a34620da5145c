"""AdamW whose parameters may be 16-bit copies of float32 masters that the optimizer keeps."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from a2lib.optim.updates import Numbers, Tensors, update
from a2lib.parallel.agreement import parameters_of
from a2lib.parallel.group import is_shard
from a2lib.parallel.lane import Lane

DTYPES = (torch.float32, torch.bfloat16)
MASTER, MOMENTS, STEP = "master", ("exp_avg", "exp_avg_sq"), "step"
KEPT = {MASTER, *MOMENTS, STEP}
# Settings of a group that torch.optim.AdamW has beside ours.
OF_PYTORCH = {
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
}


class MasterAdamW(torch.optim.Optimizer):
    """Update weights by AdamW, and keep a float32 master of each bfloat16 weight.

    Arguments:

    - ``params``: parameters or groups of them, in float32 or bfloat16. They may be shards of
      ``a2lib.parallel.FSDP``; then each rank updates its part.
    - ``lr``, ``betas``, ``eps``, ``weight_decay``: numbers, as in torch.optim.AdamW.
    - ``working_dtype``, of all or of a group: torch.bfloat16 or None. With bfloat16, float32
      parameters are rounded at once, and their masters keep the exact weights. With None each
      parameter stays as it is; shards need None.

    The numbers are those of float32 weights under bf16 autocast, which casts each weight and its
    gradient in every step; a step here moves 28 bytes per parameter instead of 40. On a GPU one
    Triton kernel reads the bfloat16 gradient, updates the master and rounds it into the parameter.
    A float32 parameter is its own master.

    To know:

    - Load a model's weights before making the optimizer: a step sets each parameter to its master.
    - The model's state dict has the rounded weights; ``masters()`` and the optimizer's state dict
      have the exact ones.
    - torch.optim.AdamW and this class load each other's state dict; PyTorch's has no masters.
    - A parameter without a gradient is left out of a step.
    - A step can be captured in a CUDA graph after one that was not; ``lr`` and the other numbers
      are captured as they are.

    Not offered: amsgrad, maximize, a learning rate that is a tensor, loss scaling inside the step,
    sparse gradients, DTensors.

    Raises ValueError for numbers out of range, for another dtype, and for a ``working_dtype`` of
    shards or of parameters that have gradients.

    Source: Loshchilov and Hutter (2019), algorithm 2.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        working_dtype: torch.dtype | None = None,
    ):
        self._forget()
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "working_dtype": working_dtype})

    def _forget(self) -> None:
        self._lane: Lane | None = None
        self._last: torch.cuda.Event | None = None  # behind the last update on the lane
        self._ahead: dict[Tensor, None] = {}  # updated since the last step, by overlapping()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim.Optimizer does. Raises as the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
        except ValueError:
            self.param_groups.pop()
            raise
        for p in group["params"]:
            self._keep_master(p, group["working_dtype"] or p.dtype)

    def _keep_master(self, p: Tensor, working: torch.dtype) -> None:
        if working == torch.float32:
            return  # its own master
        # detach: a parameter that is bfloat16 already has no more than its own digits.
        self.state[p][MASTER] = p.detach().to(torch.float32, copy=True)
        if p.dtype != working:
            p.data = p.data.to(working)

    def masters(self) -> dict[Tensor, Tensor]:
        """Return a dict from each parameter to its float32 master, which may be itself.

        In it are the weights in full precision, to save or to compare.
        """
        masters = {}
        for group in self.param_groups:
            for p in group["params"]:
                # Not by state[p], which would make an entry.
                masters[p] = self.state.get(p, {}).get(MASTER, p.detach())
        return masters

    @contextlib.contextmanager
    def overlapping(self, wrapper: Any = None) -> Iterator[None]:
        """Update each parameter during the backward, as soon as its gradient is complete.

        Use this context for the last backward before a step, and call ``step`` after it, which
        updates what is left. The updates run on a stream of their own, beside the backward.

        ``wrapper`` is the DDP, BucketedDDP or FSDP of ``a2lib.parallel`` that averages the
        gradients, or None where one process trains. With a wrapper, call
        ``finish_gradient_synchronization`` after the context, and then ``step``. A bucket, or the
        shards of an FSDP's unit, are updated once they have the mean, while later ones are on their
        way; on a CPU each update waits for its mean. Of an FSDP ``step`` updates what is whole on
        every rank, and units that the forward has called more than once.

        Gradients cannot be clipped. Once its gradient is there, a parameter may have the next
        step's value: read it neither outside the graph nor by a second backward. If the backward
        raises, some parameters have been updated and some not.

        Raises TypeError for NaiveDDP or FlatDDP as ``wrapper``, which average after the backward;
        RuntimeError, without a ``wrapper``, where a hook waits for a parameter's gradient or a
        parameter is FSDP's; ValueError for parameters on several devices, and for a state that is
        not of an FSDP's shards.
        """
        group_of = {}
        for group in self.param_groups:
            for p in group["params"]:
                group_of[p] = group
        self._make_lane(group_of)
        with contextlib.ExitStack() as hooks:
            if wrapper is None:
                self._refuse_others(group_of)
                for p, group in group_of.items():
                    if p.requires_grad:
                        hook = p.register_post_accumulate_grad_hook(partial(self._now, group))
                        hooks.callback(hook.remove)
            elif not hasattr(wrapper, "each_mean"):
                raise TypeError(
                    "overlapping() takes a DDP, BucketedDDP or FSDP of a2lib.parallel, or nothing; "
                    f"got {type(wrapper).__name__}"
                )
            else:
                wrapper.meet(self)  # as before a step: an update comes before that

                def update_those(params: Sequence[Tensor]) -> None:
                    for p in params:
                        if p in group_of:
                            self._now(group_of[p], p)

                hooks.enter_context(wrapper.each_mean(update_those))
            try:
                yield
            finally:
                Lane.wait(self._last)
                self._last = None

    def _make_lane(self, params: Iterable[Tensor]) -> None:
        devices = {p.device for p in params}
        if len(devices) > 1:
            raise ValueError("parameters are on several devices; allowed is one")
        if self._lane is None and devices:
            # Behind the backward's own kernels where both wait: those are what all else waits for.
            self._lane = Lane(devices.pop(), priority=0)

    @staticmethod
    def _refuse_others(params: Iterable[Tensor]) -> None:
        for p in params:
            if is_shard(p):
                raise RuntimeError(
                    "a parameter is a shard of FSDP, which averages its gradient: say "
                    "overlapping(wrapper)"
                )
            # PyTorch has no public name for those that are registered.
            if getattr(p, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    "another hook waits for a parameter's gradient; where it is that of a DDP or "
                    "BucketedDDP of a2lib.parallel, say overlapping(wrapper)"
                )

    @torch.no_grad()
    def _now(self, group: dict[str, Any], p: Tensor) -> None:
        if p in self._ahead:
            raise RuntimeError("a second backward within overlapping() before step()")
        self._start(p)
        self._last = self._lane.run(lambda: self._update(group, p))
        self._ahead[p] = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient and is not updated yet.

        ``closure``, if given, is called first. Returns its loss, or None. Raises RuntimeError for a
        sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepping = [p for p in group["params"] if p.grad is not None or p in self._ahead]
            for p in stepping:
                if p not in self._ahead:
                    self._start(p)
                    self._update(group, p)
            if stepping:
                # All in one launch; PyTorch's own optimizers are made of these.
                torch._foreach_add_([self.state[p][STEP] for p in stepping], 1)
        self._ahead.clear()
        return loss

    def _start(self, p: Tensor) -> None:
        if STEP not in self.state[p]:
            self.state[p].update(_zeros(p))

    def _update(self, group: dict[str, Any], p: Tensor) -> None:
        if p.grad.is_sparse:
            raise RuntimeError("MasterAdamW does not take sparse gradients")
        state = self.state[p]
        master = state.get(MASTER, p)
        x = Tensors(p, p.grad, master, state["exp_avg"], state["exp_avg_sq"], state[STEP])
        update(x, _numbers(group))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.Optimizer does.

        A parameter that has a master and no step yet has zeros for the rest, since PyTorch's AdamW
        takes what has a state for what has stepped.
        """
        whole = super().state_dict()
        for i, state in whole["state"].items():
            if MASTER in state and STEP not in state:
                whole["state"][i] = {**state, **_zeros(state[MASTER])}
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, over parameters of the same dtypes, or of torch.optim.AdamW.

        A parameter in bfloat16 is set to its saved master, rounded. PyTorch's state has no masters:
        those that are here stay, so make this optimizer from the weights that belong to that state.

        Raises ValueError, before anything is changed, for the state of another optimizer, for
        amsgrad, maximize and numbers that the class refuses, and where the saved parameters have
        masters and these have none, or the other way round.
        """
        is_pytorchs = _is_pytorchs(state_dict["param_groups"])
        for group in state_dict["param_groups"]:
            _check_numbers(group)
        names, params = parameters_of(state_dict["param_groups"]), parameters_of(self.param_groups)
        pairs = list(zip(names, params, strict=False))  # PyTorch says where they differ
        for name, p in pairs:
            saved, here = state_dict["state"].get(name, {}), self.state.get(p, {})
            same_masters = is_pytorchs or (MASTER in saved) == (MASTER in here)
            if not saved.keys() <= KEPT or not same_masters:
                raise ValueError(
                    f"a saved parameter has {sorted(saved)}, the one here {sorted(here)}: load "
                    "into a model and an optimizer with the dtypes of those that were saved"
                )
        before = {p: state[MASTER] for p, state in self.state.items() if MASTER in state}
        working = [group["working_dtype"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, dtype in zip(self.param_groups, working, strict=True):
            group["working_dtype"] = dtype
            for name in OF_PYTORCH:
                group.pop(name, None)
        for name, p in pairs:
            # Anew and in float32: PyTorch rounds to the parameters' dtype.
            for key, value in state_dict["state"].get(name, {}).items():
                self.state[p][key] = value.to(p.device, torch.float32, copy=True)
            if is_pytorchs:
                # PyTorch's AdamW keeps a master that it was given, and does not update it.
                self.state[p].pop(MASTER, None)
                if p in before:
                    self.state[p][MASTER] = before[p]
            elif MASTER in self.state.get(p, {}):
                p.data.copy_(self.state[p][MASTER])


def _is_pytorchs(groups: list[dict[str, Any]]) -> bool:
    """Return whether saved groups were torch.optim.AdamW's when they were saved. Raises ValueError
    for what MasterAdamW does not do, and for the groups of any other optimizer."""
    for group in groups:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ValueError(f"{name} is {group[name]}; allowed is False")
    # torch.optim.Adam has the same names, and decays its gradients in place of its weights.
    if all(group.get("decoupled_weight_decay", "amsgrad" in group) for group in groups):
        return True
    if all("working_dtype" in group for group in groups):
        return False
    raise ValueError("the state is another optimizer's; allowed is MasterAdamW's or AdamW's")


def _numbers(group: dict[str, Any]) -> Numbers:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    log1 = math.log(beta1) if beta1 else -math.inf
    log2 = math.log(beta2) if beta2 else -math.inf
    decay = lr * group["weight_decay"]
    return Numbers(lr, 1 - beta1, 1 - beta2, log1, log2, group["eps"], decay)


def _zeros(p: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter that is like ``p`` before its first step."""
    state = {STEP: torch.zeros((), dtype=torch.float32, device=p.device)}
    for name in MOMENTS:
        state[name] = torch.zeros_like(p, dtype=torch.float32)
    return state


def _check_numbers(group: dict[str, Any]) -> None:
    """Raise ValueError for numbers out of range, and for a tensor in their place."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) or not value >= 0:
            raise ValueError(f"{name} is {value!r}; allowed are numbers from 0")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas!r}; allowed are two numbers from 0 to below 1")


def _check(group: dict[str, Any]) -> None:
    """Raise ValueError for a group that this class does not take."""
    _check_numbers(group)
    working = group["working_dtype"]
    if working not in (None, torch.bfloat16):
        raise ValueError(f"working_dtype is {working}; allowed are torch.bfloat16 and None")
    for p in group["params"]:
        if p.dtype not in DTYPES:
            names = " and ".join(map(str, DTYPES))
            raise ValueError(f"a parameter is {p.dtype}; allowed are {names}")
        if hasattr(p, "device_mesh"):
            raise ValueError("a parameter is a DTensor; allowed are plain tensors, as in our FSDP")
        if working in (None, p.dtype):
            continue
        if is_shard(p):
            raise ValueError(
                "a parameter is a shard of FSDP, which keeps its dtype; allowed is a working_dtype "
                "of None"
            )
        if p.grad is not None:
            raise ValueError(
                "a parameter to be rounded has a gradient; make the optimizer before the first "
                "backward, or drop the gradients"
            )
