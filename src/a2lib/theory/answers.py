"""Every answer of "Parallelism on paper", with its formula, value, unit and assumption.

The questions of 2026 ask for formulas; their values are those of an example layer and device.
"""

from dataclasses import asdict, dataclass

from a2lib.theory import accounting, collectives, parallelism
from a2lib.theory.accounting import GB, GIB, H100_GB, XXL, Mesh
from a2lib.theory.parallelism import EXAMPLE, PASSES, Layer

WHOLE = "answer"  # the part of a question that has no parts
BYTES_ONLY = "two bytes per element; a message costs its bytes over W and no latency"
OVERLAP = "communication runs beside computation; " + BYTES_ONLY

# The backward of tensor parallelism on device i, W1 and W2 sharded by columns, W3 by rows.
TENSOR_BACKWARD = (
    "dz(i) = dy W3(i)ᵀ",
    "dx2(i) = dz(i) * f(x1(i))",
    "dx1(i) = dz(i) * f'(x1(i)) * x2(i)",
    "dW3(i) = z(i)ᵀ dy",
    "dW2(i) = xᵀ dx2(i)",
    "dW1(i) = xᵀ dx1(i)",
    "dx = all-reduce over i of dx1(i) W1(i)ᵀ + dx2(i) W2(i)ᵀ",
)


@dataclass(frozen=True)
class Answer:
    """One quantity that part ``part`` of ``question`` asks for. ``value`` is a number, a list of
    lines where equations are asked for, or None where there is no such number."""

    question: str
    part: str
    quantity: str
    formula: str
    value: float | int | list[str] | None
    unit: str
    assumption: str


def all_answers(layer: Layer = EXAMPLE, n: int = 8) -> list[Answer]:
    """Return the answers of both editions. Times and operations of 2026 are on ``n`` devices, and
    on an n by n mesh where there are two axes. Raises ValueError for an ``n`` that is not above
    0."""
    collectives.positive(n=n)
    return [
        *state_answers(),
        *device_answers(),
        *batch_answers(),
        ring_answer(layer, n),
        *data_parallel_answers(layer, n),
        *fsdp_answers(layer, n),
        *tensor_answers(layer, n),
        *mesh_answers(layer, n),
    ]


def state_answers() -> list[Answer]:
    """Return the answers of communication_accounting (a)."""
    adamw = "AdamW, fp32, no copies in bf16"
    saved = "bf16, the inputs of the two layers of each block, no nonlinearity"
    gpu, token = H100_GB * GB, XXL.saved_bytes_per_token
    lines = [
        ("parameters", "2 L D F", XXL.parameters, "parameters", "two matrices per block"),
        ("weights", "4 P", XXL.state["weights"] / GB, "GB", adamw),
        ("gradients", "4 P", XXL.state["gradients"] / GB, "GB", adamw),
        ("optimizer", "8 P", XXL.state["optimizer"] / GB, "GB", adamw),
        ("state", "16 P", XXL.state_bytes / GB, "GB", adamw),
        ("state", "16 P", XXL.state_bytes / GIB, "GiB", adamw),
        ("saved for the backward, per token", "2 L (D + F)", token, "bytes", saved),
        (
            "H100s for the state",
            "16 P / 80 GB",
            -(-XXL.state_bytes // gpu),
            "GPUs",
            "80 GB of 1e9 bytes each, nothing else in them",
        ),
        (
            "tokens whose activations fill one H100",
            "80 GB / A",
            gpu // token,
            "tokens",
            "80 GB of 1e9 bytes, nothing else in it",
        ),
    ]
    return [Answer("communication_accounting", "a", *line) for line in lines]


def device_answers() -> list[Answer]:
    """Return the answers of communication_accounting (b)."""
    rest = "GB of 1e9 bytes; no gathered weights, temporaries or buffers"
    bytes_of_a_device = "(16 P + A T / 2) / N + A T / 2"
    lines = []
    for tokens in (0, 1024, 4096, 8192):
        quantity = f"N_FSDP with the activations of {tokens} tokens"
        formula = f"{bytes_of_a_device} < 95 GB"
        lines.append((quantity, formula, XXL.least_devices(tokens), "devices", rest))
    for tokens in (0, 4096):
        n = XXL.least_devices(tokens)
        quantity = f"memory per device of {n}, with the activations of {tokens} tokens"
        lines.append((quantity, bytes_of_a_device, XXL.device_bytes(tokens, n) / GB, "GB", rest))
    quantity = "tokens past which no N_FSDP suffices"
    half = "half of the activations are on every device; " + rest
    lines.append((quantity, "A T / 2 < 95 GB", XXL.most_tokens(), "tokens", half))
    return [Answer("communication_accounting", "b", *line) for line in lines]


def batch_answers() -> list[Answer]:
    """Return the answers of communication_accounting (c) and (d)."""
    question = "communication_accounting"
    answers = []
    for name, mesh in accounting.readings().items():
        chosen = " (our reading)" if mesh == Mesh() else ""
        text = f"axes communicate {name}; M_X and M_Y multiply W_ici{chosen}"
        for quantity, formula, tokens in (
            ("least batch per device", threshold(mesh), mesh.least_tokens()),
            ("least batch overall", "X Y times that per device", mesh.batch()),
        ):
            answers.append(Answer(question, "c", quantity, formula, tokens, "tokens", text))
    for trick in accounting.tricks():
        quantity, price = f"least batch overall: {trick.name}", f"price: {trick.price}"
        answers.append(
            Answer(question, "d", quantity, trick.formula, trick.overall, "tokens", price)
        )
    return answers


def threshold(mesh: Mesh) -> str:
    """Return the formula of ``mesh.least_tokens``, with r_n = (n - 1) / n where rings are exact."""
    over, factor = ("r_X α / (M_X Y)", "r_Y ") if mesh.ring else ("α / (M_X Y)", "")
    if mesh.combine == "max":
        return over
    return f"{over} / (1 - {factor}α Y / (M_Y F))"


def ring_answer(layer: Layer, n: int) -> Answer:
    """Return the answer of alternate_ring_all_reduce, for the gradients of the layer."""
    size = layer.weight_bytes
    seconds = collectives.alternate_all_reduce_s(size, n, layer.bandwidth)
    where = _at(layer, f"S {size:.4g} bytes, N {n}") + "; whole tensors, N - 1 rounds"
    question = "alternate_ring_all_reduce"
    return Answer(question, WHOLE, "time", "(N - 1) S / W", seconds, "s", where)


def data_parallel_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of data_parallel_calcs."""
    where = _at(layer, f"N {n}") + "; "
    cost = parallelism.data_parallel(layer, n)["backward"]
    sent = "12 (N - 1) D F / (N W)"
    return [
        _flops("data_parallel_calcs", "a", "backward", cost.flops, where),
        Answer(
            "data_parallel_calcs",
            "b",
            "communication backward",
            sent,
            cost.data_s,
            "s",
            where + BYTES_ONLY,
        ),
        _data_limit("data_parallel_calcs", "largest N", layer, where),
    ]


def fsdp_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of fsdp_calcs."""
    where = _at(layer, f"N {n}") + "; "
    again = where + "weights are gathered again in the backward; " + BYTES_ONLY
    costs = parallelism.fully_sharded(layer, n)
    flops, times, limits = [], [], []
    for pass_ in reversed(PASSES):
        cost = costs[pass_]
        formula = f"{_factor(pass_)} (N - 1) D F / (N W)"
        flops.append(_flops("fsdp_calcs", "a", pass_, cost.flops, where))
        quantity = f"communication {pass_}"
        times.append(Answer("fsdp_calcs", "b", quantity, formula, cost.data_s, "s", again))
        limits.append(_data_limit("fsdp_calcs", f"largest N, {pass_}", layer, where))
    return flops + times + limits


def tensor_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of tp_calcs."""
    where = _at(layer, f"N {n}") + "; "
    whole = where + "every device has all of dy and x"
    parts = where + OVERLAP + "; the batch goes in two or more parts"
    costs = parallelism.tensor_parallel(layer, n)
    equations = list(TENSOR_BACKWARD)
    backward = Answer("tp_calcs", "a", "backward", "equations", equations, "equations", whole)
    flops, times, limits = [], [], []
    for pass_ in PASSES:
        cost = costs[pass_]
        flops.append(_flops("tp_calcs", "b", pass_, cost.flops, where))
        quantity, formula = f"communication {pass_}", "4 (N - 1) B D / (N W)"
        sent = where + BYTES_ONLY
        times.append(Answer("tp_calcs", "c", quantity, formula, cost.tensor_s, "s", sent))
        over = "(2 C)" if pass_ == "forward" else "C"
        quantity, formula = f"largest N, {pass_}", f"N <= 1 + 3 F W / {over}"
        limit = parallelism.tensor_limit(layer, pass_)
        limits.append(Answer("tp_calcs", "d", quantity, formula, limit, "devices", parts))
    return [backward, *flops, *times, *limits]


def mesh_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of fsdp_tp_calcs."""
    where, example = _at(layer, f"N_FSDP {n}, N_TP {n}"), _at(layer)
    cost = parallelism.fully_sharded_tensor_parallel(layer, n, n)["forward"]
    n_fsdp, n_tp = parallelism.data_limit(layer), parallelism.tensor_limit(layer)
    shared_fsdp, shared_tp = parallelism.shared_mesh_split(layer)
    overlap = f"{example}; the axes overlap; N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}"
    shared = f"{example}; the axes share the links; N_FSDP {shared_fsdp:.4g}, N_TP {shared_tp:.4g}"
    lines = [
        (
            "a",
            "FLOPs forward, per device",
            "6 B D F / (N_FSDP N_TP)",
            cost.flops,
            "FLOP",
            where,
        ),
        (
            "b",
            "communication forward",
            "max(6 (N_FSDP - 1) D F, 4 (N_TP - 1) B D) / (N_FSDP N_TP W)",
            max(cost.data_s, cost.tensor_s),
            "s",
            f"{where}; the axes overlap; {BYTES_ONLY}",
        ),
        (
            "c",
            "largest N_FSDP N_TP",
            "N <= (1 + B W / C) (1 + 3 F W / (2 C))",
            parallelism.mesh_limit(layer),
            "devices",
            overlap,
        ),
        (
            "d",
            "largest N_FSDP N_TP",
            "N <= (a + b + a b)^2 / (4 a b), a = B W / C, b = 3 F W / (2 C); "
            "where its N_FSDP or N_TP is below 1, N <= 1 + max(a, b)",
            parallelism.shared_mesh_limit(layer),
            "devices",
            shared,
        ),
    ]
    return [Answer("fsdp_tp_calcs", *line) for line in lines]


def by_question(answers: list[Answer]) -> dict[str, dict[str, list[dict]]]:
    """Return the answers by question id and part, for JSON."""
    questions: dict[str, dict[str, list[dict]]] = {}
    for answer in answers:
        entry = asdict(answer)
        parts = questions.setdefault(entry.pop("question"), {})
        parts.setdefault(entry.pop("part"), []).append(entry)
    return questions


def _flops(question: str, part: str, pass_: str, flops: float, where: str) -> Answer:
    quantity, formula = f"FLOPs {pass_}, per device", f"{_factor(pass_)} B D F / N"
    matmuls = where + "matmuls alone, two operations per multiply-add"
    return Answer(question, part, quantity, formula, flops, "FLOP", matmuls)


def _data_limit(question: str, quantity: str, layer: Layer, where: str) -> Answer:
    limit = parallelism.data_limit(layer)
    formula = "N <= 1 + B W / C"
    return Answer(question, "c", quantity, formula, limit, "devices", where + OVERLAP)


def _factor(pass_: str) -> int:
    """Return the factor of B D F in a pass's FLOPs: two for each of its matmuls."""
    return 6 if pass_ == "forward" else 12


def _at(layer: Layer, more: str = "") -> str:
    sizes = f"at B {layer.tokens} tokens, D {layer.d_model}, F {layer.d_ff}"
    text = f"{sizes}, C {layer.flops:.4g} FLOP/s, W {layer.bandwidth:.4g} B/s"
    return f"{text}, {more}" if more else text
