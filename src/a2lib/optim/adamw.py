"""AdamW whose parameters may be 16-bit copies of float32 masters that the optimizer keeps."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from a2lib.optim.updates import update
from a2lib.parallel.group import is_shard
from a2lib.parallel.lane import Ended, Lane

WORKING = (torch.float32, torch.bfloat16)
MASTER, MOMENTS, NORMALISER = "master", ("exp_avg", "exp_avg_sq"), "normaliser"


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) with float32 master weights.

    A parameter in bfloat16 has a master in float32 here, which is what is updated, and is set to
    the master rounded by the same kernel; its gradient is read in bfloat16. Under bf16 autocast a
    float32 weight is cast in every step and its gradient cast back: what a product reads, and what
    the optimizer adds up, are the same numbers here, at 28 bytes a parameter for the update in the
    place of 28 for the update and 12 for casts. A float32 parameter is its own master.

    ``working_dtype``, of the call or of a group, is torch.bfloat16 or torch.float32: float32
    parameters of the group are rounded to it where they are, before the first backward, and their
    masters keep what they were. None leaves each as it is. The model's state dict has rounded
    weights then; ``masters()`` has the exact ones, and so has this optimizer's state dict. What
    else sets a 16-bit parameter, ``model.load_state_dict`` say, the next step undoes: do it before.

    Bias is corrected by ``normaliser``, the sums of the moments' weights (1 - beta**t), float64
    on the parameter's device, so that a step may be captured in a CUDA graph, after one that is
    not; ``lr`` and the other numbers are captured as they are. A parameter without a gradient is
    left out of a step. On a GPU a contiguous parameter takes one kernel (Triton); any other, and
    the CPU, PyTorch's operators.

    Not offered: amsgrad, maximize, a learning rate that is a tensor, loss scaling inside the step,
    sparse gradients; and a place inside of ShardedOptimizer or FSDP, which move the parameters
    themselves. Raises ValueError for numbers out of range, for another dtype, and for a group that
    is to be rounded while its parameters have gradients.
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
        self._lanes: dict[torch.device, Lane] = {}
        self._events: dict[torch.device, Ended | None] = {}
        self._ahead: dict[Tensor, None] = {}  # updated since the last step, by overlapping()
        self._captured = False  # whether that was in the capture of a CUDA graph
        self._ends: dict[tuple, tuple[Tensor, Tensor]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch.optim.Optimizer; errors as the class."""
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
            return
        # detach: a parameter that is bfloat16 already has no more than its own digits.
        self.state[p][MASTER] = p.detach().to(torch.float32, copy=True)
        p.data = p.data.to(working)

    def masters(self) -> dict[Tensor, Tensor]:
        """Each parameter and the float32 tensor that is updated, which may be itself."""
        return {
            p: self.state.get(p, {}).get(MASTER, p.detach())
            for group in self.param_groups
            for p in group["params"]
        }

    @contextlib.contextmanager
    def overlapping(self, wrapper: Any = None) -> Iterator[None]:
        """Within it a backward updates each parameter as soon as its gradient is complete, on a
        stream of priority 0 beside the backward's own; ``step`` then does what is left.

        ``wrapper`` is the DDP or BucketedDDP of ``a2lib.parallel`` that averages the gradients,
        None where one process trains. With it a bucket is updated once it is the mean, while later
        ones are on their way; ``finish_gradient_synchronization`` comes after the context, and
        ``step`` after that. On the CPU its updates are in the finish. NaiveDDP, FlatDDP and FSDP,
        whose gradients are the means after backward alone, are refused.

        For the last backward before a step. A parameter must not be read after its gradient is
        there: one that is used outside the graph, or again by a second backward, would be the next
        step's already; and no gradient can be clipped. If backward raises, some parameters have
        been updated and some not. Raises RuntimeError where without ``wrapper`` a hook waits for a
        parameter's gradient, or a parameter is FSDP's; TypeError for a wrapper that averages after
        backward.
        """
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        with contextlib.ExitStack() as hooks:
            if wrapper is None:
                self._refuse_others(group_of)
                for p, group in group_of.items():
                    if p.requires_grad:
                        hook = p.register_post_accumulate_grad_hook(partial(self._now, group))
                        hooks.callback(hook.remove)
            elif not hasattr(wrapper, "each_mean"):
                raise TypeError(
                    "overlapping() takes a DDP or BucketedDDP of a2lib.parallel, or nothing; got "
                    f"{type(wrapper).__name__}"
                )
            else:

                def update_those(params: Sequence[Tensor]) -> None:
                    for p in params:
                        if p in group_of:
                            self._now(group_of[p], p)

                hooks.enter_context(wrapper.each_mean(update_those))
            try:
                yield
            finally:
                for device, event in self._events.items():
                    self._lanes[device].wait(event)
                self._events.clear()

    @staticmethod
    def _refuse_others(params: Iterable[Tensor]) -> None:
        for p in params:
            if is_shard(p):
                raise RuntimeError(
                    "a parameter is a shard, whose gradient is complete after backward alone: FSDP "
                    "has no overlapping()"
                )
            if getattr(p, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    "another hook waits for a parameter's gradient; where it is that of a DDP or "
                    "BucketedDDP of a2lib.parallel, say overlapping(wrapper)"
                )

    @torch.no_grad()
    def _now(self, group: dict[str, Any], p: Tensor) -> None:
        self._drop_cut_off()
        if p in self._ahead:
            raise RuntimeError("a second backward within overlapping() before step()")
        self._captured = p.is_cuda and torch.cuda.is_current_stream_capturing()
        self._start(p)
        if p.device not in self._lanes:
            # Behind the backward's own kernels where both wait: those are what all else waits for.
            self._lanes[p.device] = Lane(p.device, priority=0)
        self._events[p.device] = self._lanes[p.device].run(lambda: self._update(group, p))
        self._ahead[p] = None

    def _drop_cut_off(self) -> None:
        """Forget what was updated in a capture that failed: it has not been."""
        if self._captured and not torch.cuda.is_current_stream_capturing():
            self._captured = False
            self._ahead.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what has a gradient and is not updated yet; the closure's loss, if there is
        one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._drop_cut_off()
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None or p in self._ahead]
            for p in found:
                if p not in self._ahead:
                    self._start(p)
                    self._update(group, p)
            self._count(group, found)
        self._ahead.clear()
        return loss

    def _start(self, p: Tensor) -> None:
        state = self.state[p]
        if NORMALISER in state:
            return
        for name in MOMENTS:
            state[name] = torch.zeros_like(p, dtype=torch.float32)
        state[NORMALISER] = torch.zeros(2, dtype=torch.float64, device=p.device)

    def _count(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step more: each normaliser towards 1, all of a device in one launch."""
        of_device: dict[torch.device, list[Tensor]] = {}
        for p in params:
            of_device.setdefault(p.device, []).append(self.state[p][NORMALISER])
        for device, found in of_device.items():
            key = (device, *group["betas"])
            if key not in self._ends:
                rest = [1 - beta for beta in group["betas"]]
                self._ends[key] = tuple(
                    torch.tensor(x, dtype=torch.float64, device=device) for x in ([1, 1], rest)
                )
            one, rest = self._ends[key]
            torch._foreach_lerp_(found, [one] * len(found), [rest] * len(found))

    def _update(self, group: dict[str, Any], p: Tensor) -> None:
        state, grad = self.state[p], p.grad
        if grad.is_sparse:
            raise RuntimeError("MasterAdamW does not take sparse gradients")
        tensors = (state.get(MASTER, p), *(state[name] for name in MOMENTS), state[NORMALISER])
        rest = (1 - beta for beta in group["betas"])
        decay = group["lr"] * group["weight_decay"]
        update(p, grad, *tensors, group["lr"], *rest, group["eps"], decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch.optim.Optimizer, which would round masters and moments to the parameters'
        dtype: here they stay what they are. A parameter is set to its saved master, rounded where
        it is in bfloat16; without one its own stays. A state of PyTorch's AdamW is taken as well.
        Raises ValueError for settings that this class has not, before anything is changed.
        """
        for group in state_dict["param_groups"]:
            _check_settings(group)
        held = {p: state[MASTER] for p, state in self.state.items() if MASTER in state}
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for i, (group, p) in zip(saved, params, strict=True):
                self.state[p] = self._loaded(group, p, state_dict["state"].get(i, {}))
                if MASTER in self.state[p]:
                    p.copy_(self.state[p][MASTER])
                    if p.dtype == torch.float32:
                        del self.state[p][MASTER]
                elif p in held:
                    self.state[p][MASTER] = held[p]

    @staticmethod
    def _loaded(group: dict[str, Any], p: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        # copy: what is saved stays the caller's
        names = (MASTER, *MOMENTS, NORMALISER)
        state = {name: saved[name].to(p.device, copy=True) for name in names if name in saved}
        if "step" in saved:
            sums = [1 - beta ** float(saved["step"]) for beta in group["betas"]]
            state[NORMALISER] = torch.tensor(sums, dtype=torch.float64, device=p.device)
            state |= {name: state[name].float() for name in MOMENTS}
        return state


def _check_settings(group: dict[str, Any]) -> None:
    """Also of a saved group, which may be another optimizer's."""
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{name} is {group[name]}; allowed is False")
    for name in ("lr", "eps", "weight_decay"):
        value = group.get(name)
        if isinstance(value, Tensor | None) or not value >= 0:
            raise ValueError(f"{name} is {value!r}; allowed are numbers from 0")
    betas = group.get("betas", ())
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas!r}; allowed are two numbers from 0 to below 1")


def _check(group: dict[str, Any]) -> None:
    _check_settings(group)
    names = " and ".join(map(str, WORKING))
    if group["working_dtype"] not in (None, *WORKING):
        raise ValueError(f"working_dtype is {group['working_dtype']}; allowed are {names}")
    for p in group["params"]:
        if p.dtype not in WORKING:
            raise ValueError(f"a parameter is {p.dtype}; allowed are {names}")
        if group["working_dtype"] == torch.float32 and p.dtype != torch.float32:
            raise ValueError("working_dtype torch.float32: a parameter is torch.bfloat16 already")
        if p.grad is not None and group["working_dtype"] not in (None, p.dtype):
            raise ValueError(
                "a parameter to be rounded has a gradient; make the optimizer before the first "
                "backward, or drop the gradients"
            )
