"""The same stack by PyTorch's own wrappers: DDP, FSDP2 (fully_shard) and tensor parallelism of
DTensor (parallelize_module), on the same mesh and with the same weights."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.nn.functional import silu
from torch.nn.parallel import DistributedDataParallel

from a2lib.experiments.parallelism.schemes import DATA, TENSOR, layer_weights


class FeedForward(nn.Module):
    """y = (silu(x W1) * (x W2)) W3; a Linear keeps the transpose of a matrix."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, w in weights.items():
            linear = nn.Linear(*w.shape, bias=False, dtype=w.dtype, device="meta")
            linear.weight = nn.Parameter(w.T.contiguous())
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(silu(self.w1(x)) * self.w2(x))


class TorchStack:
    """One rank's part, with what ``schemes.Stack`` has but for passes of their own."""

    def __init__(self, mesh: DeviceMesh, spec: Mapping, device: str, seed: int) -> None:
        layers = (layer_weights(i, spec, device, seed) for i in range(spec["layers"]))
        model = nn.Sequential(*map(FeedForward, layers))
        self._along_data = mesh[DATA].size()
        self._place = mesh.get_local_rank(DATA)
        if mesh[TENSOR].size() > 1:
            # x is taken as one DTensor, so that both terms of its gradient are one sum.
            columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
            whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
            plan = {"w1": columns, "w2": columns, "w3": rows}
            plan[""] = parallel.PrepareModuleInput(**whole)
            for layer in model:
                parallel.parallelize_module(layer, mesh[TENSOR], plan)
        if spec["scheme"] == "dp":
            self._model = DistributedDataParallel(model, process_group=mesh.get_group(DATA))
        else:
            self._model = model
            if self._along_data > 1:
                for layer in model:
                    fully_shard(layer, mesh=mesh[DATA])
                fully_shard(model, mesh=mesh[DATA])

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._along_data)[self._place]

    def end_to_end(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """y and dx of this rank's tokens; gradients are made anew."""
        self._model.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        y = self._model(x)
        y.backward(dy)
        return y.detach(), x.grad

    def own(self, name: str, matrix: Tensor) -> Tensor:
        """``gradients`` are whole."""
        return matrix

    def gradients(self) -> dict[str, Tensor]:
        """Of each whole matrix, summed over the batch, by name such as ``0.w1``; collective."""
        found = {}
        for name, p in self._model.named_parameters():
            name = name.removeprefix("module.").removesuffix(".weight")
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name] = self._along_data * grad.T  # theirs is a mean over data
        return found
