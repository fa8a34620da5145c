"""One SwiGLU feed-forward layer on N devices: FLOPs, communication, and the largest N.

The layer is the handout's of 2026, over B tokens (rows of x), D = d_model, F = d_ff:

    x1 = x W1    x2 = x W2    z = f(x1) * x2    y = z W3        W1, W2 (D, F)    W3 (F, D)

Three matmuls forward, six backward, each 2 B D F FLOPs. Weights, activations and gradients have two
bytes per element. A device computes ``flops`` FLOPs and sends ``bandwidth`` bytes per second.
Communication runs beside computation, and is the bottleneck where it takes longer.
Data parallelism: Li et al., 2020. FSDP: Rajbhandari et al., 2020 (ZeRO stage 3), Zhao et al., 2023.
Tensor parallelism: Shoeybi et al., 2019. Both: Austin et al., 2025, part 5.

The formulas are arithmetic alone, so that they take sympy's symbols as well as numbers.
"""

import math
from dataclasses import dataclass, replace

from a2lib.checks import check_name
from a2lib.shapes import SIZES
from a2lib.theory.collectives import all_gather_s, all_reduce_s, positive
from a2lib.theory.devices import DEVICES

FORWARD_PRODUCTS, BACKWARD_PRODUCTS, MATRICES = 3, 6, 3
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer and the device it runs on; ``tokens`` is the batch of all devices.

    Raises ValueError for a number that is not above 0.
    """

    tokens: int
    d_model: int
    d_ff: int
    flops: float
    bandwidth: float
    element_bytes: int = 2

    def __post_init__(self) -> None:
        positive(**vars(self))

    @property
    def weight_bytes(self):
        """Bytes of its three matrices, and of their gradients."""
        return MATRICES * self.element_bytes * self.d_model * self.d_ff

    @property
    def activation_bytes(self):
        """Bytes of x, of y, and of the gradient of either, over the whole batch."""
        return self.element_bytes * self.tokens * self.d_model


@dataclass(frozen=True)
class Cost:
    """One pass on one device: FLOPs, and the seconds of computation and of each axis' links.

    Data parallelism and FSDP use the axis ``data``, tensor parallelism the axis ``tensor``.
    """

    flops: float
    compute_s: float
    data_s: float = 0
    tensor_s: float = 0


def data_parallel(layer: Layer, n) -> dict[str, Cost]:
    """Return the costs of forward and backward with ``n`` replicas, which all-reduce their
    gradients in the backward."""
    forward = _cost(layer, FORWARD_PRODUCTS, n)
    reduce = all_reduce_s(layer.weight_bytes, n, layer.bandwidth)
    return {"forward": forward, "backward": _cost(layer, BACKWARD_PRODUCTS, n, data_s=reduce)}


def fully_sharded(layer: Layer, n) -> dict[str, Cost]:
    """Return the costs of forward and backward with weights sharded over ``n`` devices.

    Weights are gathered in each pass, since they are freed after the forward, and gradients are
    reduce-scattered in the backward.
    """
    return fully_sharded_tensor_parallel(layer, n, 1)


def tensor_parallel(layer: Layer, n) -> dict[str, Cost]:
    """Return the costs of forward and backward with W1 and W2 sharded by columns and W3 by rows.

    y is a sum over the ``n`` devices in the forward, dx in the backward: an all-reduce each.
    """
    return fully_sharded_tensor_parallel(layer, 1, n)


def fully_sharded_tensor_parallel(layer: Layer, n_fsdp, n_tp) -> dict[str, Cost]:
    """Return the costs of forward and backward on a mesh of ``n_fsdp`` by ``n_tp`` devices.

    A device has 1 / n_fsdp of the batch, and for its columns and rows 1 / n_tp of the weights, of
    which it stores 1 / n_fsdp. Whether the two axes' seconds add up depends on the links.
    Raises ValueError for a number of devices that is not above 0.
    """
    positive(n_fsdp=n_fsdp, n_tp=n_tp)
    weights, activations = layer.weight_bytes / n_tp, layer.activation_bytes / n_fsdp
    gather = all_gather_s(weights, n_fsdp, layer.bandwidth)
    reduce = all_reduce_s(activations, n_tp, layer.bandwidth)
    n = n_fsdp * n_tp
    return {
        "forward": _cost(layer, FORWARD_PRODUCTS, n, data_s=gather, tensor_s=reduce),
        "backward": _cost(layer, BACKWARD_PRODUCTS, n, data_s=2 * gather, tensor_s=reduce),
    }


def data_limit(layer: Layer):
    """Return the largest N of data parallelism and of FSDP, in either pass: 1 + B W / C."""
    return 1 + data_slope(layer)


def tensor_limit(layer: Layer, pass_: str = "forward"):
    """Return the largest N of tensor parallelism: 1 + 3 F W / (2 C) in the forward and
    1 + 3 F W / C in the backward. Raises ValueError for another pass."""
    check_name("pass", pass_, PASSES)
    return 1 + tensor_slope(layer) * (1 if pass_ == "forward" else 2)


def data_slope(layer: Layer):
    """Return a = B W / C. N_FSDP - 1 over a is communication over computation on FSDP's axis."""
    return 2 * layer.tokens * layer.bandwidth / (layer.element_bytes * layer.flops)


def tensor_slope(layer: Layer):
    """Return b = 3 F W / (2 C) of the forward. N_TP - 1 over b is communication over computation on
    the axis of tensor parallelism."""
    return 3 * layer.d_ff * layer.bandwidth / (layer.element_bytes * layer.flops)


def mesh_limit(layer: Layer):
    """Return the largest N_FSDP N_TP of a forward whose axes overlap: (1 + a) (1 + b)."""
    return data_limit(layer) * tensor_limit(layer)


def shared_mesh_limit(layer: Layer):
    """Return the largest N_FSDP N_TP of a forward whose axes share the links.

    (a + b + a b)^2 / (4 a b) where the best split has two axes, 1 + a or 1 + b where it has one.
    """
    n_fsdp, n_tp = shared_mesh_split(layer)
    return n_fsdp * n_tp


def shared_mesh_split(layer: Layer) -> tuple:
    """Return N_FSDP and N_TP, as real numbers, at which ``shared_mesh_limit`` is reached."""
    a, b = data_slope(layer), tensor_slope(layer)
    budget = 1 + 1 / a + 1 / b  # of n_fsdp / a + n_tp / b
    n_fsdp = min(max(a * budget / 2, 1), 1 + a)
    return n_fsdp, b * (budget - n_fsdp / a)


def largest_mesh(layer: Layer, shared: bool) -> tuple[int, int]:
    """Return N_FSDP and N_TP of the largest compute-bound forward, in whole devices.

    ``shared`` says whether the two axes share the links. Of meshes that are equally large, the one
    with the fewest tensor-parallel devices is returned.
    """
    best = 1, 1
    for n_tp in range(1, math.floor(tensor_limit(layer)) + 1):
        left = 1 - (n_tp - 1) / tensor_slope(layer) if shared else 1
        n_fsdp = math.floor(1 + left * data_slope(layer))
        if n_fsdp * n_tp > math.prod(best):
            best = n_fsdp, n_tp
    return best


def largest_mesh_of_nodes(layer: Layer, network: float, node: int = 8) -> tuple[int, int]:
    """Return N_FSDP and N_TP of the largest compute-bound forward with FSDP between nodes and
    tensor parallelism within them, in whole nodes and devices.

    Each device sends ``network`` bytes per second to other nodes, beside the layer's bandwidth to
    the ``node`` devices of its own.
    """
    nodes = math.floor(data_limit(replace(layer, bandwidth=network)))
    return nodes, min(node, math.floor(tensor_limit(layer)))


def fsdp_limit_over_nodes(layer: Layer, network: float, node: int = 8):
    """Return the largest N of FSDP alone over nodes: its rings pass through all ``node`` devices of
    each, so that a shard leaves a node by as many links at once."""
    return min(data_limit(layer), data_limit(replace(layer, bandwidth=node * network)))


def fsdp_nodes_in_two_stages(layer: Layer, network: float, node: int = 8) -> int:
    """Return the most nodes of compute-bound FSDP that gathers in two stages at once: each device
    a shard from the other nodes, and from its own node's devices what they have gathered."""
    between = data_limit(replace(layer, bandwidth=network))
    within = data_slope(layer) / (node - 1)
    return math.floor(min(between, within))


# The example of the command and of the book: the FFN of the 8B model and the tokens of one step
# of the 2026 leaderboard, on an H200.
_SHAPE, _ON = SIZES["8B"], DEVICES["H200"]
EXAMPLE = Layer(2 * 32_768, _SHAPE.d_model, _SHAPE.d_ff, flops=_ON.flops, bandwidth=_ON.link)


def _cost(layer: Layer, products: int, n, **seconds) -> Cost:
    positive(n=n)
    flops = products * 2 * layer.tokens * layer.d_model * layer.d_ff / n
    return Cost(flops, flops / layer.flops, **seconds)
