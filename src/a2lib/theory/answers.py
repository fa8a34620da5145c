"""Every answer of "Parallelism on paper", with its formula, value, unit and assumption.

Values of the questions of 2026, which ask for formulas, are those of an example layer and device.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from a2lib.theory import accounting, collectives, parallelism
from a2lib.theory.accounting import GB, GIB, H100_GB, XXL, Mesh
from a2lib.theory.parallelism import EXAMPLE, Layer

WHOLE = "answer"  # the part of a question that has no parts
HANDOUT = "two bytes an element; a message costs its bytes over W and no latency"
OVERLAP = "communication runs beside computation; " + HANDOUT

# The backward of tensor parallelism on device i, W1 and W2 cut by columns, W3 by rows.
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
    """One quantity that part ``part`` of ``question`` asks for. ``value`` is a number, or a list of
    lines where equations are asked for, or None where there is no such number."""

    question: str
    part: str
    quantity: str
    formula: str
    value: float | int | list[str] | None
    unit: str
    assumption: str


def all_answers(layer: Layer = EXAMPLE, n: int = 8) -> list[Answer]:
    """The answers of both editions; times and operations of 2026 are on ``n`` devices, and on an
    n by n mesh where there are two axes. Raises ValueError for an ``n`` that is not above 0."""
    collectives.positive(n=n)
    found = accounting_answers() + ring_answer(layer, n)
    return found + layer_answers(layer, n) + mesh_answers(layer, n)


def _into(found: list[Answer], question: str) -> Callable[..., None]:
    """What adds an answer, given from its part on."""
    return lambda *rest: found.append(Answer(question, *rest))


def accounting_answers() -> list[Answer]:
    """communication_accounting (a) to (d)."""
    found = []
    say = _into(found, "communication_accounting")
    adamw, token = "AdamW, fp32, no copies in bf16", XXL.saved_bytes_per_token
    say("a", "parameters", "2 L D F", XXL.parameters, "parameters", "two matrices a block")
    for name, size in XXL.state.items():
        say("a", name, "8 P" if name == "optimizer" else "4 P", size / GB, "GB", adamw)
    say("a", "state", "16 P", XXL.state_bytes / GB, "GB", adamw)
    say("a", "state", "16 P", XXL.state_bytes / GIB, "GiB", adamw)
    kept = "bf16, the inputs of the two layers of each block, no nonlinearity"
    say("a", "saved for the backward, per token", "2 L (D + F)", token, "bytes", kept)
    gpu, each = H100_GB * GB, "80 GB of 1e9 bytes each, nothing else in them"
    say("a", "H100s for the state", "16 P / 80 GB", -(-XXL.state_bytes // gpu), "GPUs", each)
    one = "80 GB of 1e9 bytes, nothing else in it"
    say("a", "tokens whose activations fill one H100", "80 GB / A", gpu // token, "tokens", one)
    rest = "GB of 1e9 bytes; no gathered weights, temporaries or buffers"
    held = "(16 P + A T / 2) / N + A T / 2"
    for tokens in (0, 1024, 4096, 8192):
        what = f"N_FSDP with the activations of {tokens} tokens"
        say("b", what, f"{held} < 95 GB", XXL.least_devices(tokens), "devices", rest)
    for tokens in (0, 4096):
        n = XXL.least_devices(tokens)
        what = f"memory per device of {n}, with the activations of {tokens} tokens"
        say("b", what, held, XXL.device_bytes(tokens, n) / GB, "GB", rest)
    what = "tokens past which no N_FSDP suffices"
    half = "half of the activations are whole on every device; " + rest
    say("b", what, "A T / 2 < 95 GB", XXL.most_tokens(), "tokens", half)
    for name, mesh in accounting.readings().items():
        chosen = " (our reading)" if mesh == Mesh() else ""
        text = f"axes communicate {name}; M_X and M_Y multiply W_ici{chosen}"
        say("c", "least batch per device", threshold(mesh), mesh.least_tokens(), "tokens", text)
        say("c", "least batch overall", "X Y times that per device", mesh.batch(), "tokens", text)
    for trick in accounting.tricks():
        what, price = f"least batch overall: {trick.name}", f"price: {trick.price}"
        say("d", what, trick.formula, trick.overall, "tokens", price)
    return found


def threshold(mesh: Mesh) -> str:
    """The formula of ``mesh.least_tokens``, with r_n = (n - 1) / n where rings are exact."""
    over, factor = ("r_X α / (M_X Y)", "r_Y ") if mesh.ring else ("α / (M_X Y)", "")
    return over if mesh.combine == "max" else f"{over} / (1 - {factor}α Y / (M_Y F))"


def ring_answer(layer: Layer, n: int) -> list[Answer]:
    """alternate_ring_all_reduce, for the gradients of the layer."""
    size = layer.weight_bytes
    seconds = collectives.alternate_all_reduce_s(size, n, layer.bandwidth)
    where = _at(layer, f"S {size:.4g} bytes, N {n}") + "; whole tensors, N - 1 rounds"
    question = "alternate_ring_all_reduce"
    return [Answer(question, WHOLE, "time", "(N - 1) S / W", seconds, "s", where)]


def layer_answers(layer: Layer, n: int) -> list[Answer]:
    """data_parallel_calcs, fsdp_calcs and tp_calcs."""
    data, fsdp, tensor = found = [], [], []
    where, limit = _at(layer, f"N {n}") + "; ", parallelism.data_limit(layer)
    products = where + "products alone, two operations a multiply-add"
    handout, overlap, most = where + HANDOUT, where + OVERLAP, "N <= 1 + B W / C"

    say, cost = _into(data, "data_parallel_calcs"), parallelism.data_parallel(layer, n)["backward"]
    say("a", "FLOPs backward, per device", "12 B D F / N", cost.flops, "FLOP", products)
    say("b", "communication backward", "12 (N - 1) D F / (N W)", cost.data_s, "s", handout)
    say("c", "largest N", most, limit, "devices", overlap)

    say, costs = _into(fsdp, "fsdp_calcs"), parallelism.fully_sharded(layer, n)
    again = where + "weights are gathered again in the backward; " + HANDOUT
    for pass_, k in (("backward", 12), ("forward", 6)):
        what, cost = f"FLOPs {pass_}, per device", costs[pass_]
        say("a", what, f"{k} B D F / N", cost.flops, "FLOP", products)
        formula = f"{k} (N - 1) D F / (N W)"
        say("b", f"communication {pass_}", formula, cost.data_s, "s", again)
        say("c", f"largest N, {pass_}", most, limit, "devices", overlap)

    say, costs = _into(tensor, "tp_calcs"), parallelism.tensor_parallel(layer, n)
    whole = where + "dy and x are whole on every device"
    say("a", "backward", "equations", list(TENSOR_BACKWARD), "equations", whole)
    parts = overlap + "; the batch goes in two or more parts"
    for pass_, k, over in (("forward", 6, "(2 C)"), ("backward", 12, "C")):
        what, cost = f"FLOPs {pass_}, per device", costs[pass_]
        say("b", what, f"{k} B D F / N", cost.flops, "FLOP", products)
        what, formula = f"communication {pass_}", "4 (N - 1) B D / (N W)"
        say("c", what, formula, cost.tensor_s, "s", handout)
        most, limit = f"N <= 1 + 3 F W / {over}", parallelism.tensor_limit(layer, pass_)
        say("d", f"largest N, {pass_}", most, limit, "devices", parts)
    return [one for some in found for one in sorted(some, key=lambda answer: answer.part)]


def mesh_answers(layer: Layer, n: int) -> list[Answer]:
    """fsdp_tp_calcs."""
    found = []
    say, where = _into(found, "fsdp_tp_calcs"), _at(layer, f"N_FSDP {n}, N_TP {n}")
    cost = parallelism.fully_sharded_tensor_parallel(layer, n, n)["forward"]
    say("a", "FLOPs forward, per device", "6 B D F / (N_FSDP N_TP)", cost.flops, "FLOP", where)
    formula = "max(6 (N_FSDP - 1) D F, 4 (N_TP - 1) B D) / (N_FSDP N_TP W)"
    seconds, text = max(cost.data_s, cost.tensor_s), f"{where}; the axes overlap; {HANDOUT}"
    say("b", "communication forward", formula, seconds, "s", text)
    n_fsdp, n_tp = parallelism.data_limit(layer), parallelism.tensor_limit(layer)
    formula, limit = "N <= (1 + B W / C) (1 + 3 F W / (2 C))", parallelism.mesh_limit(layer)
    text = f"{_at(layer)}; the axes overlap; N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}"
    say("c", "largest N_FSDP N_TP", formula, limit, "devices", text)
    n_fsdp, n_tp = parallelism.shared_mesh_split(layer)
    formula = (
        "N <= (a + b + a b)^2 / (4 a b), a = B W / C, b = 3 F W / (2 C); "
        "where its N_FSDP or N_TP is below 1, N <= 1 + max(a, b)"
    )
    text = f"{_at(layer)}; the axes share the links; N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}"
    limit = parallelism.shared_mesh_limit(layer)
    say("d", "largest N_FSDP N_TP", formula, limit, "devices", text)
    return found


def by_question(answers: list[Answer]) -> dict[str, dict[str, list[dict]]]:
    """Question id -> part -> its quantities, for JSON."""
    found: dict[str, dict[str, list[dict]]] = {}
    for answer in answers:
        entry = asdict(answer)
        found.setdefault(entry.pop("question"), {}).setdefault(entry.pop("part"), []).append(entry)
    return found


def _at(layer: Layer, more: str = "") -> str:
    sizes = f"at B {layer.tokens} tokens, D {layer.d_model}, F {layer.d_ff}"
    text = f"{sizes}, C {layer.flops:.4g} FLOP/s, W {layer.bandwidth:.4g} B/s"
    return f"{text}, {more}" if more else text
