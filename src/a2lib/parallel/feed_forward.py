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
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import silu

from a2lib.parallel.group import all_gather_single, reduce_scatter_single

DATA, TENSOR = "data", "tensor"
NAMES = ("w1", "w2", "w3")
# Parts of the batch under tensor parallelism: one computes while the other's sum travels.
PARTS = 2

Layer = Mapping[str, Tensor]  # the matrices w1, w2, w3
Wait = Callable[[], object]
# Groups stay until a process ends, so that each mesh has its groups once.
_meshes: dict[tuple, DeviceMesh] = {}


def mesh_of(device: str, along_data: int, along_tensor: int) -> DeviceMesh:
    """Return the mesh of all ranks, those along tensor next to each other; collective the first
    time."""
    place = (device, along_data, along_tensor)
    if place not in _meshes:
        shape = (along_data, along_tensor)
        _meshes[place] = init_device_mesh(device, shape, mesh_dim_names=(DATA, TENSOR))
    return _meshes[place]


def own_tokens(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Return the rows of a whole batch that belong to this rank's place along data."""
    return x.chunk(mesh[DATA].size())[mesh.get_local_rank(DATA)]


def own_columns(mesh: DeviceMesh, name: str, matrix: Tensor) -> Tensor:
    """Return the columns of a whole W1 or W2, the rows of a W3, that belong to this rank's place
    along tensor."""
    dimension = 0 if name == "w3" else 1
    return matrix.chunk(mesh[TENSOR].size(), dimension)[mesh.get_local_rank(TENSOR)]


def plain(x: Tensor, layers: Iterable[Layer]) -> Tensor:
    """Return y of all layers, in one process."""
    for w in layers:
        x = (silu(x @ w["w1"]) * (x @ w["w2"])) @ w["w3"]
    return x


class Wire:
    """The collectives of both axes of a mesh. While it is `silent` nothing is sent: what is left is
    the computation alone."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = {axis: mesh.get_group(axis) for axis in (DATA, TENSOR)}
        self._sizes = {axis: dist.get_world_size(group) for axis, group in self._groups.items()}
        self.silent = False
        self._log: list[tuple[str, Callable, tuple[Tensor, ...]]] | None = None

    def start(self, axis: str, call: Callable, *tensors: Tensor) -> Wait:
        """Start the collective `call` beside what is computed. Returns `wait`: on a GPU the current
        stream waits then, on the CPU the host."""
        if self.silent or self._sizes[axis] == 1:
            return _nothing
        if self._log is not None:
            self._log.append((axis, call, tensors))
        return call(*tensors, group=self._groups[axis], async_op=True).wait

    def without(self, run: Callable[[], object]) -> None:
        """Call `run` with nothing sent."""
        self.silent = True
        try:
            run()
        finally:
            self.silent = False

    def messages(self, run: Callable[[], object]) -> dict[str, list[tuple]]:
        """Call `run`, and return what it sends by axis, which `send` sends again."""
        self._log = []
        try:
            run()
        finally:
            log, self._log = self._log, None
        by_axis: dict[str, list[tuple]] = {}
        for axis, call, tensors in log:
            if call is dist.all_reduce:
                tensors[0].zero_()  # a sum of sums would overflow
            by_axis.setdefault(axis, []).append((axis, call, *tensors))
        return by_axis

    def send(self, messages: Iterable[tuple]) -> None:
        """Start all of these `messages`, then wait for all."""
        for wait in [self.start(*message) for message in messages]:
            wait()


class FeedForwardStack:
    """One rank's part of `layers` on `mesh` (axes data, tensor); with `sharded` each rank along
    data keeps a part of the weights, as FSDP does.

    `layers` are the whole matrices of each layer, the same on every rank; an iterator is read once,
    a layer at a time. `forward` keeps what `backward` needs, which may be called any number of
    times then.
    """

    def __init__(self, mesh: DeviceMesh, layers: Iterable[Layer], sharded: bool) -> None:
        self.wire = Wire(mesh)
        along_data = mesh[DATA].size()
        self._sharded = sharded and along_data > 1
        self._parts = PARTS if mesh[TENSOR].size() > 1 else 1
        self._held: list[Tensor] = []  # the weights that this rank keeps, flat, by layer
        self._sums: list[Tensor] = []  # their gradients
        for layer in layers:
            matrices = [own_columns(mesh, name, layer[name]) for name in NAMES]
            self._shape = matrices[0].shape
            flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
            whole = flat.numel()
            if self._sharded:
                flat = flat.view(along_data, -1)[mesh.get_local_rank(DATA)].clone()
            self._held.append(flat)
            self._sums.append(torch.zeros_like(flat))
        # Two layers whole: the one at work and the next one's weights, or the last one's gradients.
        buffers = 2 if self._sharded else 0
        self._gathered = [flat.new_zeros(whole) for _ in range(buffers)]
        self._spent = [flat.new_zeros(whole) for _ in range(buffers)]
        self._kept: list[list[tuple[Tensor, ...]]] = []

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return y of this rank's tokens."""
        parts = list(x.chunk(self._parts))
        summed: list[Wait] = [_nothing] * self._parts
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
        """Return dx of this rank's tokens; the gradients of its weights are there after it."""
        parts = list(dy.chunk(self._parts))
        summed: list[Wait] = [_nothing] * self._parts
        sent: dict[int, Wait] = {}
        last = len(self._held) - 1
        coming = self._gather(last)
        for i in range(last, -1, -1):
            coming()
            w1, w2, w3 = self._matrices(self._weights(i))
            if i > 0:
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

    def end_to_end(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and dx of this rank's tokens."""
        return self.forward(x), self.backward(dy)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of this rank's columns of each matrix, summed over the batch, by name
        such as ``0.w1``; collective."""
        named = {}
        for i, flat in enumerate(self._sums):
            if self._sharded:
                whole = torch.zeros_like(self._spent[0])
                self.wire.start(DATA, all_gather_single, whole, flat)()
                flat = whole
            for name, matrix in zip(NAMES, self._matrices(flat), strict=True):
                named[f"{i}.{name}"] = matrix
        return named

    def _gather(self, i: int) -> Wait:
        """Start to gather layer `i`, into the buffer that the layer at work does not use."""
        if not self._sharded:
            return _nothing
        return self.wire.start(DATA, all_gather_single, self._gathered[i % 2], self._held[i])

    def _weights(self, i: int) -> Tensor:
        return self._gathered[i % 2] if self._sharded else self._held[i]

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        columns, rows = self._shape, self._shape[::-1]
        w1, w2, w3 = flat.chunk(3)
        return [w1.view(columns), w2.view(columns), w3.view(rows)]


def relative_errors(mesh: DeviceMesh, stack, layers: Iterable[Layer], x, dy) -> dict[str, float]:
    """Return how far y, dx and each gradient of `stack` are from those of one process, over the
    norm of these, by name; collective.

    `x` and `dy` are of the whole batch, `layers` the whole matrices. The stack has `end_to_end` and
    `gradients`, as FeedForwardStack has.
    """
    x = x.detach().requires_grad_()
    layers = [{name: w.detach().requires_grad_() for name, w in layer.items()} for layer in layers]
    y = plain(x, layers)
    y.backward(dy)
    own_y, own_dx = stack.end_to_end(own_tokens(mesh, x.detach()), own_tokens(mesh, dy))
    errors = {
        "y": _relative(own_y, own_tokens(mesh, y.detach())),
        "dx": _relative(own_dx, own_tokens(mesh, x.grad)),
    }
    for name, gradient in stack.gradients().items():
        i, matrix = name.split(".")
        right = own_columns(mesh, matrix, layers[int(i)][matrix].grad)
        errors[f"gradient of {name}"] = _relative(gradient, right)
    return errors


def _relative(mine: Tensor, right: Tensor) -> float:
    error = ((mine.double() - right.double()).norm() / right.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def _joined(parts: list[Tensor], summed: list[Wait]) -> Tensor:
    for wait in summed:
        wait()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nothing() -> None:
    """Wait for nothing, where nothing was sent."""
