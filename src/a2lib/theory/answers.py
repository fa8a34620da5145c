"""Every answer of "Parallelism on paper", with its formula, value, unit and assumption.

The questions of 2026 ask for formulas; their values are those of an example layer and device.
"""

from dataclasses import asdict, dataclass

from a2lib.theory import accounting, parallelism
from a2lib.theory.accounting import GB, GIB, H100_GB, XXL, Mesh
from a2lib.theory.collectives import alternate_all_reduce_s
from a2lib.theory.parallelism import EXAMPLE, Layer

WHOLE = "answer"  # the part of a question that has no parts
# The backward of tensor parallelism on device i, W1 and W2 sharded by columns, W3 by rows.
TENSOR_BACKWARD = [
    "dz(i) = dy W3(i)ᵀ",
    "dx2(i) = dz(i) * f(x1(i))",
    "dx1(i) = dz(i) * f'(x1(i)) * x2(i)",
    "dW3(i) = z(i)ᵀ dy",
    "dW2(i) = xᵀ dx2(i)",
    "dW1(i) = xᵀ dx1(i)",
    "dx = all-reduce over i of dx1(i) W1(i)ᵀ + dx2(i) W2(i)ᵀ",
]


@dataclass(frozen=True)
class Answer:
    """One quantity that part ``part`` of ``question`` asks for. ``value`` is a number, or a list
    of lines where equations are asked for."""

    question: str
    part: str
    quantity: str
    formula: str
    value: float | int | list[str]
    unit: str
    assumption: str


def all_answers(layer: Layer = EXAMPLE, n: int = 8) -> list[Answer]:
    """Return the answers of both editions. Times and operations of 2026 are on ``n`` devices, and
    on an n by n mesh where there are two axes. Raises ValueError for an ``n`` that is not above
    0."""
    return [*accounting_answers(), *layer_answers(layer, n), *mesh_answers(layer, n)]


def accounting_answers() -> list[Answer]:
    """Return the answers of communication_accounting."""
    question = "communication_accounting"
    state, token, gpu = XXL.state, XXL.saved_bytes_per_token, H100_GB * GB
    fp32 = (
        "AdamW, all in fp32; saved in bf16: the inputs of each block's two layers; nothing else "
        "in 80 GB of 1e9 bytes"
    )
    lines = [
        ("parameters", "2 L D F", XXL.parameters, "parameters"),
        ("weights", "4 P", state["weights"] / GB, "GB"),
        ("gradients", "4 P", state["gradients"] / GB, "GB"),
        ("optimizer", "8 P", state["optimizer"] / GB, "GB"),
        ("state", "16 P", XXL.state_bytes / GB, "GB"),
        ("state", "16 P", XXL.state_bytes / GIB, "GiB"),
        ("saved for the backward, per token", "A = 2 L (D + F)", token, "bytes"),
        ("H100s for the state", "16 P / 80 GB", -(-XXL.state_bytes // gpu), "GPUs"),
        ("tokens whose activations fill one H100", "80 GB / A", gpu // token, "tokens"),
    ]
    answers = [Answer(question, "a", *line, fp32) for line in lines]

    held, half = "(16 P + A T / 2) / N + A T / 2", "A T / 2 < 95 GB"
    rest = "GB of 1e9 bytes; no gathered weights, temporaries or buffers"
    lines = [("tokens past which no N_FSDP suffices", half, XXL.most_tokens(), "tokens")]
    for tokens in (0, 1024, 4096, 8192):
        n, words = XXL.least_devices(tokens), f"with the activations of {tokens} tokens"
        size = XXL.device_bytes(tokens, n) / GB
        lines.append((f"N_FSDP {words}", f"{held} < 95 GB", n, "devices"))
        lines.append((f"memory per device of {n}, {words}", held, size, "GB"))
    answers += [Answer(question, "b", *line, rest) for line in lines]

    mesh = Mesh()
    text = "axes communicate at the same time, rings as 1; M_X and M_Y multiply W_ici"
    for line in (
        ("least batch per device", "α / (M_X Y)", mesh.least_tokens(), "tokens"),
        ("least batch overall", "X Y times that per device", mesh.batch(), "tokens"),
    ):
        answers.append(Answer(question, "c", *line, text))
    for trick in accounting.tricks():
        line = f"least batch overall: {trick.name}", trick.formula, trick.overall, "tokens"
        answers.append(Answer(question, "d", *line, f"price: {trick.price}"))
    return answers


def layer_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of 2026 on ``n`` devices along one axis."""
    data = parallelism.data_parallel(layer, n)["backward"]
    fsdp = parallelism.fully_sharded(layer, n)
    tensor = parallelism.tensor_parallel(layer, n)
    size, tensor_limit = layer.weight_bytes, parallelism.tensor_limit
    ring_s = alternate_all_reduce_s(size, n, layer.bandwidth)
    forward, backward = "6 B D F / N", "12 B D F / N"
    once, twice = "6 (N - 1) D F / (N W)", "12 (N - 1) D F / (N W)"
    sums = "4 (N - 1) B D / (N W)"
    most, limit = "N <= 1 + B W / C", parallelism.data_limit(layer)
    lines = [
        ("alternate_ring_all_reduce", WHOLE, "time", "(N - 1) S / W", ring_s, "s"),
        ("data_parallel_calcs", "a", "FLOPs backward, per device", backward, data.flops, "FLOP"),
        ("data_parallel_calcs", "b", "communication backward", twice, data.data_s, "s"),
        ("data_parallel_calcs", "c", "largest N", most, limit, "devices"),
    ]
    for pass_, flops, sent in (("backward", backward, twice), ("forward", forward, once)):
        cost = fsdp[pass_]
        lines += [
            ("fsdp_calcs", "a", f"FLOPs {pass_}, per device", flops, cost.flops, "FLOP"),
            ("fsdp_calcs", "b", f"communication {pass_}", sent, cost.data_s, "s"),
            ("fsdp_calcs", "c", f"largest N, {pass_}", most, limit, "devices"),
        ]
    lines.append(("tp_calcs", "a", "backward", "equations", TENSOR_BACKWARD, "equations"))
    for pass_, flops, over in (("forward", forward, "(2 C)"), ("backward", backward, "C")):
        cost, widest = tensor[pass_], f"N <= 1 + 3 F W / {over}"
        lines += [
            ("tp_calcs", "b", f"FLOPs {pass_}, per device", flops, cost.flops, "FLOP"),
            ("tp_calcs", "c", f"communication {pass_}", sums, cost.tensor_s, "s"),
            ("tp_calcs", "d", f"largest N, {pass_}", widest, tensor_limit(layer, pass_), "devices"),
        ]
    where = f"{_at(layer)}, N {n}, S {size:.4g} bytes"
    return [Answer(*line, where) for line in lines]


def mesh_answers(layer: Layer, n: int) -> list[Answer]:
    """Return the answers of fsdp_tp_calcs, times and operations on an n by n mesh."""
    cost = parallelism.fully_sharded_tensor_parallel(layer, n, n)["forward"]
    sent_s = max(cost.data_s, cost.tensor_s)
    n_fsdp, n_tp = parallelism.data_limit(layer), parallelism.tensor_limit(layer)
    shared_fsdp, shared_tp = parallelism.shared_mesh_split(layer)
    shared_limit = parallelism.shared_mesh_limit(layer)
    flops = "6 B D F / (N_FSDP N_TP)"
    sent = "max(6 (N_FSDP - 1) D F, 4 (N_TP - 1) B D) / (N_FSDP N_TP W)"
    apart = "N <= (1 + B W / C) (1 + 3 F W / (2 C))"
    together = (
        "N <= (a + b + a b)^2 / (4 a b), a = B W / C, b = 3 F W / (2 C); "
        "where its N_FSDP or N_TP is below 1, N <= 1 + max(a, b)"
    )
    here = f"N_FSDP {n}, N_TP {n}; the axes overlap"
    best = f"the axes overlap; N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}"
    shared = f"the axes share the links; N_FSDP {shared_fsdp:.4g}, N_TP {shared_tp:.4g}"
    most = "largest N_FSDP N_TP"
    lines = [
        ("a", "FLOPs forward, per device", flops, cost.flops, "FLOP", here),
        ("b", "communication forward", sent, sent_s, "s", here),
        ("c", most, apart, parallelism.mesh_limit(layer), "devices", best),
        ("d", most, together, shared_limit, "devices", shared),
    ]
    return [Answer("fsdp_tp_calcs", *line[:-1], f"{_at(layer)}; {line[-1]}") for line in lines]


def by_question(answers: list[Answer]) -> dict[str, dict[str, list[dict]]]:
    """Return the answers by question id and part, for JSON."""
    questions: dict[str, dict[str, list[dict]]] = {}
    for answer in answers:
        entry = asdict(answer)
        parts = questions.setdefault(entry.pop("question"), {})
        parts.setdefault(entry.pop("part"), []).append(entry)
    return questions


def _at(layer: Layer) -> str:
    return (
        "matmuls alone, two operations per multiply-add; two bytes per element, a message costs "
        "its bytes over W and no latency; communication runs beside computation; at B "
        f"{layer.tokens} tokens, D {layer.d_model}, F {layer.d_ff}, C {layer.flops:.4g} FLOP/s, "
        f"W {layer.bandwidth:.4g} B/s"
    )
