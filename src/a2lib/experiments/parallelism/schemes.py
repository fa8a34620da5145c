"""Data, sharded and tensor parallelism of a stack of feed-forward layers, written out.

Each layer is the handout's of 2026, over B tokens (rows of x), D = d_model, F = d_ff:

    x1 = x W1    x2 = x W2    z = silu(x1) * x2    y = z W3        W1, W2 (D, F)    W3 (F, D)

and the y of one is the x of the next. Ranks form a mesh of ``data`` by ``tensor``. A rank has the
tokens of its place along data, and of each matrix the columns (of W3 the rows) of its place along
tensor. Along data these are whole on each rank (data parallelism), or each keeps a part (FSDP).
Messages are started and waited for as late as the next product allows:

    data parallelism   all-reduce of a layer's gradients while the layers before it go backward
    FSDP               all-gather of a layer while the one before it computes, in either pass, and
                       reduce-scatter of its gradients while the next ones go backward
    tensor             all-reduce of y (backward of dx) of half of the tokens while the other half
                       computes, and backward while the weights' gradients of its own do

Shapes of a rank: x and y (B / data, D); x1, x2, z (B / data / parts, F / tensor). Gradients are of
the whole batch: sums, not means. ``plain`` is the obvious twin in one process, for autograd.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import silu

from a2lib.experiments.parallelism import PARTS
from a2lib.parallel.group import all_gather_single, reduce_scatter_single

DATA, TENSOR = "data", "tensor"
NAMES = ("w1", "w2", "w3")
SILU_VARIANCE = 0.355  # of silu(a) b, a and b normal: so y is about as large as x
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_weights(i: int, spec: Mapping[str, object], device: str, seed: int) -> dict[str, Tensor]:
    """The matrices of layer ``i`` of ``spec`` (parallelism.Setting) by name, the same on every
    rank."""
    d_model, d_ff, dtype = spec["d_model"], spec["d_ff"], TORCH_DTYPES[spec["dtype"]]
    generator = torch.Generator(device).manual_seed(seed + i)
    shapes = {"w1": (d_model, d_ff), "w2": (d_model, d_ff), "w3": (d_ff, d_model)}
    spread = {"w1": d_model, "w2": d_model, "w3": SILU_VARIANCE * d_ff}
    return {
        name: torch.randn(shape, generator=generator, device=device, dtype=dtype)
        / math.sqrt(spread[name])
        for name, shape in shapes.items()
    }


def plain(x: Tensor, layers: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """y of all layers, in one process."""
    for w in layers:
        x = (silu(x @ w["w1"]) * (x @ w["w2"])) @ w["w3"]
    return x


class Wire:
    """The collectives of both axes of a mesh. While it is ``silent`` nothing is sent: what is left
    is the computation alone."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = {axis: mesh.get_group(axis) for axis in (DATA, TENSOR)}
        self.ranks = {axis: dist.get_rank(group) for axis, group in self._groups.items()}
        self.sizes = {axis: dist.get_world_size(group) for axis, group in self._groups.items()}
        self.silent = False
        self._log: list[tuple[str, Callable, tuple[Tensor, ...]]] | None = None

    def messages(self, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
        """What ``run`` sends, to be sent again with nothing beside it: by axis."""
        self._log = []
        try:
            run()
        finally:
            log, self._log = self._log, None
        for _, call, tensors in log:
            if call is dist.all_reduce:
                tensors[0].zero_()  # a sum of sums would overflow

        def replay(axis: str) -> list[Callable[[], object]]:
            return [self.start(a, call, *tensors) for a, call, tensors in log if a == axis]

        return {
            axis: lambda axis=axis: replay(axis)
            for axis in (DATA, TENSOR)
            if any(a == axis for a, _, _ in log)
        }

    def start(self, axis: str, call: Callable, *tensors: Tensor) -> Callable[[], object]:
        """Start the collective ``call``, beside what is computed; returns ``wait``: on a GPU the
        current stream waits then, on the CPU the host."""
        if self.silent or self.sizes[axis] == 1:
            return _nothing
        if self._log is not None:
            self._log.append((axis, call, tensors))
        return call(*tensors, group=self._groups[axis], async_op=True).wait


class Stack:
    """One rank's part of the layers of ``spec`` on ``mesh`` (axes data, tensor).

    ``forward`` keeps what ``backward`` needs, which may be called any number of times then.
    """

    def __init__(self, mesh: DeviceMesh, spec: Mapping, device: str, seed: int) -> None:
        self.wire = Wire(mesh)
        along_data, along_tensor = (self.wire.sizes[axis] for axis in (DATA, TENSOR))
        self._sharded = spec["scheme"] != "dp" and along_data > 1
        self._parts = PARTS if along_tensor > 1 else 1
        self._shape = spec["d_model"], spec["d_ff"] // along_tensor
        whole = 3 * math.prod(self._shape)
        made = {"dtype": TORCH_DTYPES[spec["dtype"]], "device": device}
        self._held, self._sums = [], []  # weights and gradients that this rank keeps, by layer
        for i in range(spec["layers"]):
            matrices = layer_weights(i, spec, device, seed)
            flat = torch.cat([self.own(name, w).reshape(-1) for name, w in matrices.items()])
            if self._sharded:
                flat = flat.view(along_data, -1)[self.wire.ranks[DATA]].clone()
            self._held.append(flat)
            self._sums.append(torch.zeros_like(flat))
        # Two layers whole: the one at work and the next one's weights, or the last one's gradients.
        buffers = 2 if self._sharded else 0
        self._gathered = [torch.zeros(whole, **made) for _ in range(buffers)]
        self._spent = [torch.zeros(whole, **made) for _ in range(buffers)]
        self._kept: list[list[tuple[Tensor, ...]]] = []

    def own(self, name: str, matrix: Tensor) -> Tensor:
        """The columns of a whole W1 or W2, the rows of a W3, that this rank's place along tensor
        works with."""
        place, parts = self.wire.ranks[TENSOR], self.wire.sizes[TENSOR]
        return matrix.chunk(parts, 0 if name == "w3" else 1)[place]

    def rows(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole batch."""
        return x.chunk(self.wire.sizes[DATA])[self.wire.ranks[DATA]]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """y of this rank's tokens."""
        parts = list(x.chunk(self._parts))
        summed = [_nothing] * self._parts
        self._kept = []
        coming = self._gather(0)
        for i in range(len(self._held)):
            coming()
            w1, w2, w3 = self._matrices(self._weights(i))
            if i + 1 < len(self._held):
                coming = self._gather(i + 1)
            kept = []
            for p, wait in enumerate(summed):
                wait()
                x = parts[p]
                x1, x2 = x @ w1, x @ w2
                z = silu(x1) * x2
                parts[p] = z @ w3
                summed[p] = self.wire.start(TENSOR, dist.all_reduce, parts[p])
                kept.append((x, x1, x2, z))
            self._kept.append(kept)
        return _joined(parts, summed)

    @torch.no_grad()
    def backward(self, dy: Tensor) -> Tensor:
        """dx of this rank's tokens; the gradients of its weights are there after it."""
        parts = list(dy.chunk(self._parts))
        summed = [_nothing] * self._parts
        sent: dict[int, Callable] = {}
        last = len(self._held) - 1
        coming = self._gather(last)
        for i in range(last, -1, -1):
            coming()
            w1, w2, w3 = self._matrices(self._weights(i))
            if i:
                coming = self._gather(i - 1)
            sent.pop(i + 2, _nothing)()  # its buffer is this layer's
            gradients = self._spent[i % 2] if self._sharded else self._sums[i]
            dw1, dw2, dw3 = self._matrices(gradients)
            for p, wait in enumerate(summed):
                wait()
                dy = parts[p]
                x, x1, x2, z = self._kept[i][p]
                dz = dy @ w3.T
                dx2 = dz * silu(x1)
                dx1 = torch.ops.aten.silu_backward(dz * x2, x1)
                dx = dx1 @ w1.T
                dx.addmm_(dx2, w2.T)
                parts[p] = dx
                summed[p] = self.wire.start(TENSOR, dist.all_reduce, dx)
                for total, left, right in ((dw3, z, dy), (dw2, x, dx2), (dw1, x, dx1)):
                    if p == 0:
                        torch.mm(left.T, right, out=total)
                    else:
                        total.addmm_(left.T, right)
            if self._sharded:
                sent[i] = self.wire.start(DATA, reduce_scatter_single, self._sums[i], gradients)
            else:
                sent[i] = self.wire.start(DATA, dist.all_reduce, gradients)
        for wait in sent.values():
            wait()
        return _joined(parts, summed)

    def gradients(self) -> dict[str, Tensor]:
        """Of what ``own`` gives of each matrix, by name such as ``0.w1``; collective."""
        found = {}
        for i, flat in enumerate(self._sums):
            if self._sharded:
                whole = torch.zeros_like(self._spent[0])
                self.wire.start(DATA, all_gather_single, whole, flat)()
                flat = whole
            matrices = zip(NAMES, self._matrices(flat), strict=True)
            found |= {f"{i}.{name}": matrix for name, matrix in matrices}
        return found

    def _gather(self, i: int) -> Callable[[], object]:
        """Start to gather layer ``i``, whose buffer nothing reads any more that is not before."""
        if not self._sharded:
            return _nothing
        return self.wire.start(DATA, all_gather_single, self._gathered[i % 2], self._held[i])

    def _weights(self, i: int) -> Tensor:
        return self._gathered[i % 2] if self._sharded else self._held[i]

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        shapes = self._shape, self._shape, self._shape[::-1]
        return [w.view(shape) for w, shape in zip(flat.chunk(3), shapes, strict=True)]


def _joined(parts: list[Tensor], summed: list[Callable[[], object]]) -> Tensor:
    for wait in summed:
        wait()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nothing() -> None:
    """What is waited for where nothing was sent."""
