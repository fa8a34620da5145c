"""communication_accounting: memory and least batch of a stack of 220 billion parameters.

126 blocks of two matrices, (D, F) and (F, D), with nothing else. Weights, gradients and AdamW's
moments in fp32, activations and communication in bf16. The device is Google's TPU v5p, whose links
form a 3D torus; names and rates are those of the Scaling Book (Austin et al., 2025, part 5):

    X, Y      devices along the axes of FSDP and of tensor parallelism of the logical mesh
    M_X, M_Y  physical axes of the torus that each is laid over; each adds W_ici of bandwidth
    W_ici     bytes per second over one physical axis, both directions of its ring together
    alpha     C / W_ici, FLOPs that a device can compute while it sends a byte

1 GB is 1e9 bytes, 1 GiB 2^30.
"""

import math
from dataclasses import dataclass, replace

from a2lib.theory.products import NARROW, WIDE

GB, GIB = 10**9, 2**30
H100_GB, V5P_GB = 80, 95


@dataclass(frozen=True)
class Stack:
    """``blocks`` of two linear layers without biases: d_model -> d_ff -> d_model."""

    d_model: int = 16_384
    d_ff: int = 53_248
    blocks: int = 126

    @property
    def parameters(self) -> int:
        return self.blocks * 2 * self.d_model * self.d_ff

    @property
    def state(self) -> dict[str, int]:
        """Bytes in fp32 of weights, accumulated gradients and AdamW's two moments."""
        copy = WIDE * self.parameters
        return {"weights": copy, "gradients": copy, "optimizer": 2 * copy}

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    @property
    def saved_bytes_per_token(self) -> int:
        """Bytes that a token saves for the backward: the inputs of the two layers, in bf16.

        The nonlinearity is left out, as the question has it; one whose input is saved beside its
        output would add another d_ff a block.
        """
        return self.blocks * NARROW * (self.d_model + self.d_ff)

    def device_bytes(self, tokens: float, n: float) -> float:
        """Return the bytes per device: state and half of the activations divided by ``n``, and all
        of the other half.

        ``tokens`` is the batch whose activations are counted. Gathered weights, temporary tensors
        and buffers are left out, as in the question; ``gathered_bytes`` is what they are at least.
        """
        half = self.saved_bytes_per_token * tokens / 2
        return (self.state_bytes + half) / n + half

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one block's weights in bf16, which FSDP gathers to compute with."""
        return NARROW * 2 * self.d_model * self.d_ff

    def least_devices(self, tokens: float, memory: float = V5P_GB * GB) -> int | None:
        """Return the least ``n`` with ``device_bytes`` below ``memory``, or None where there is
        none."""
        half = self.saved_bytes_per_token * tokens / 2
        if half >= memory:
            return None
        return math.floor((self.state_bytes + half) / (memory - half)) + 1

    def most_tokens(self, memory: float = V5P_GB * GB) -> int:
        """Return the largest batch for which some ``n`` is enough: half of its activations is on
        every device."""
        return math.ceil(2 * memory / self.saved_bytes_per_token) - 1


XXL = Stack()


@dataclass(frozen=True)
class Mesh:
    """X by Y devices on a torus.

    The axes communicate at the same time, over links of their own, and a ring's (n - 1) / n counts
    as 1, both as in the Scaling Book.
    """

    X: float = 16
    Y: float = 4
    M_X: float = 2
    M_Y: float = 1
    W_ici: float = 2 * 9e10
    C: float = 4.6e14

    @property
    def devices(self) -> float:
        return self.X * self.Y

    @property
    def alpha(self) -> float:
        """FLOPs per byte: C / W_ici."""
        return self.C / self.W_ici

    def seconds(self, stack: Stack, tokens_per_device: float) -> dict[str, float]:
        """Return the seconds of one block's forward: computation, and communication of FSDP and of
        tensor parallelism (TP).

        FSDP gathers two matrices, each sharded over Y. TP gathers the input of the block over Y
        and reduce-scatters its output, which in bytes is one all-reduce.
        """
        D, F, b = stack.d_model, stack.d_ff, tokens_per_device
        return {
            "compute": 4 * b * D * F / self.C,
            "fsdp": 2 * NARROW * D * F / self.Y / (self.M_X * self.W_ici),
            "tp": 2 * NARROW * b * self.Y * D / (self.M_Y * self.W_ici),
        }

    def least_tokens(self) -> float:
        """Return the tokens per device from which FSDP's communication hides behind the forward.
        Whether TP's does is no matter of the batch: alpha Y <= M_Y F."""
        return self.alpha / (self.M_X * self.Y)

    def batch(self) -> float:
        """Return the tokens of the whole mesh with ``least_tokens`` on each device."""
        return self.least_tokens() * self.devices

    def rate(self, stack: Stack, tokens_per_device: float) -> float:
        """Return the share of the compute rate that a block's forward reaches if half of its
        shorter part hides: it takes its longer part and half of the shorter. The parts are
        computation and communication, of which both axes have theirs at the same time."""
        seconds = self.seconds(stack, tokens_per_device)
        compute, sent = seconds["compute"], max(seconds["fsdp"], seconds["tp"])
        return compute / (max(compute, sent) + min(compute, sent) / 2)

    def step_rate(self, stack: Stack, tokens_per_device: float, gathered: int = NARROW) -> float:
        """Return the same of forward and backward, with weights that are gathered in so many bytes
        each. The backward gathers them again and reduce-scatters gradients in bf16, and computes
        twice as much."""
        seconds = self.seconds(stack, tokens_per_device)
        spent = 0.0
        for products, sent_bytes in ((1, gathered), (2, gathered + NARROW)):
            compute = products * seconds["compute"]
            sent = max(sent_bytes / NARROW * seconds["fsdp"], seconds["tp"])
            spent += max(compute, sent) + min(compute, sent) / 2
        return 3 * seconds["compute"] / spent

    def most_rate(self, stack: Stack) -> float:
        """Return the ``rate`` of a batch so large that FSDP's communication does not count."""
        seconds = self.seconds(stack, 1)
        return 1 / (1 + seconds["tp"] / seconds["compute"] / 2)

    def tokens_for(self, stack: Stack, share: float) -> float:
        """Return the tokens per device from which ``rate`` is ``share``, two thirds or more; inf
        where TP's communication alone keeps it below."""
        if share > self.most_rate(stack):
            return math.inf
        return self.least_tokens() / (2 / share - 2)

    def device_bytes(self, stack: Stack, batch: float) -> float:
        """Return the bytes per device: its share of the state, half of its replica's activations,
        the other half over Y, and a gathered block and the next one over Y."""
        half = stack.saved_bytes_per_token * batch / self.X / 2
        gathered = 2 * stack.gathered_bytes / self.Y
        return stack.state_bytes / self.devices + half * (1 + 1 / self.Y) + gathered

    def best_tokens(self) -> float:
        """Return the tokens per device at the best X and Y, as real numbers:
        alpha^2 / (M_X M_Y F)."""
        return self.alpha**2 / (self.M_X * self.M_Y * XXL.d_ff)


@dataclass(frozen=True)
class Trick:
    """A change that makes a smaller batch enough, and its price.

    overall: the least batch of the forward
    whole_step: the least batch of forward and backward
    device_bytes: bytes per device with the least batch of the forward
    for_90: the batch of a forward at 90 % of the compute rate, if half of the shorter part hides;
        inf where there is none
    most_rate: the largest share of that rate, with any batch
    """

    name: str
    formula: str
    overall: float
    whole_step: float
    price: str
    device_bytes: float
    for_90: float
    most_rate: float


def tricks() -> list[Trick]:
    """Return the changes that lower the batch from which 4 x 4 x 4 devices are compute-bound.

    The first entry is the question's mesh, X over two physical axes and Y over one. A second axis
    for Y, or one for four pipeline stages, is taken from X. A pipeline gathers its stage's weights
    once for all micro-batches of a step, and so each device's share of the weights is a quarter.

    The backward computes twice as much. FSDP sends twice as much there, the weights again and the
    gradients; weights in 8 bits leave the gradients in bf16, 1 + 2 bytes in place of 2 + 2. Fewer
    devices are no entry: 32 could not hold the state.
    """
    mesh = Mesh()
    wide = replace(mesh, X=mesh.X / 4, Y=4 * mesh.Y, M_X=1, M_Y=2)
    best = math.sqrt(mesh.best_tokens() * mesh.devices**2 / XXL.d_ff * mesh.M_X / mesh.M_Y)
    free = replace(mesh, X=best, Y=mesh.devices / best)
    packed = replace(mesh, W_ici=2 * mesh.W_ici, M_Y=mesh.M_Y / 2)
    price = "rounded weights; gradients stay in bf16"
    narrow = _on("weights sent in 8 bits", "α / (2 M_X Y)", packed, price)
    stay = NARROW * XXL.parameters / (4 * mesh.Y) / GB

    return [
        _on("the mesh as asked", "α / (M_X Y)", mesh, "none"),
        _on("Y = 16 on two torus axes", "α / (M_X Y)", wide, "narrower matrices"),
        _on(
            "the best X and Y",
            "α² / (M_X M_Y F)",
            free,
            "a little more where X and Y are whole",
        ),
        _piped(
            f"{100 * bubble(4, 4):.0f} % of the step idle, with four micro-batches; {stay:.0f} GB "
            "of gathered weights stay on each device"
        ),
        replace(narrow, whole_step=mesh.batch() * 3 / 4),
    ]


def _on(name: str, formula: str, mesh: Mesh, price: str) -> Trick:
    batch = mesh.batch()
    for_90 = mesh.tokens_for(XXL, 0.9) * mesh.devices
    held = mesh.device_bytes(XXL, batch)
    return Trick(name, formula, batch, batch, price, held, for_90, mesh.most_rate(XXL))


def _piped(price: str) -> Trick:
    """Return the change to four stages with four micro-batches, which are all held at once."""
    stages = 4
    mesh = replace(Mesh(), X=Mesh().X / stages, M_X=1)
    devices = stages * mesh.devices
    batch = mesh.least_tokens() / stages * devices
    busy = 1 - bubble(stages, 4)
    half = XXL.saved_bytes_per_token / stages * batch / mesh.X / 2
    weights = NARROW * XXL.parameters / stages / mesh.Y
    return Trick(
        "4 stages on one torus axis",
        "α / (p M_X Y)",
        batch,
        batch,
        price,
        XXL.state_bytes / devices + half * (1 + 1 / mesh.Y) + weights,
        mesh.tokens_for(XXL, 0.9 / busy) / stages * devices,
        busy * mesh.most_rate(XXL),
    )


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step for which a device of a pipeline is idle."""
    return (stages - 1) / (micro_batches + stages - 1)
