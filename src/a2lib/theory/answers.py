"""Every answer of "Parallelism on paper", with its formula, value, unit and assumption.

Values of the questions of 2026, which ask for formulas, are those of an example layer and device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from a2lib.theory import accounting, collectives, parallelism
from a2lib.theory.accounting import GB, GIB, XXL, Mesh
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
    return [*accounting_answers(), *ring_answer(layer, n), *layer_answers(layer, n),
            *mesh_answers(layer, n)]  # fmt: skip


def accounting_answers() -> list[Answer]:
    """communication_accounting (a) to (d)."""
    found = []

    def say(part, quantity, formula, value, unit, assumption):
        found.append(Answer("communication_accounting", part, quantity, formula, value, unit,
                            assumption))  # fmt: skip

    adamw = "AdamW, fp32, no copies in bf16"
    say("a", "parameters", "2 L D F", XXL.parameters, "parameters", "two matrices a block")
    for name, size in XXL.state.items():
        say("a", name, "8 P" if name == "optimizer" else "4 P", size / GB, "GB", adamw)
    say("a", "state", "16 P", XXL.state_bytes / GB, "GB", adamw)
    say("a", "state", "16 P", XXL.state_bytes / GIB, "GiB", adamw)
    say("a", "saved for the backward, per token", "2 L (D + F)", XXL.saved_bytes_per_token, "bytes",
        "bf16, the inputs of the two layers of each block, no nonlinearity")  # fmt: skip
    say("a", "H100s for the state", "16 P / 80 GB",
        -(-XXL.state_bytes // (accounting.H100_GB * GB)), "GPUs",
        "80 GB of 1e9 bytes each, nothing else in them")  # fmt: skip
    say("a", "tokens whose activations fill one H100", "80 GB / A",
        accounting.H100_GB * GB // XXL.saved_bytes_per_token, "tokens",
        "80 GB of 1e9 bytes, nothing else in it")  # fmt: skip
    rest = "GB of 1e9 bytes; no gathered weights, temporaries or buffers"
    for tokens in (0, 1024, 4096, 8192):
        say("b", f"N_FSDP with the activations of {tokens} tokens",
            "(16 P + A T / 2) / N + A T / 2 < 95 GB", XXL.least_devices(tokens), "devices",
            rest)  # fmt: skip
    for tokens in (0, 4096):
        n = XXL.least_devices(tokens)
        say("b", f"memory per device of {n}, with the activations of {tokens} tokens",
            "(16 P + A T / 2) / N + A T / 2", XXL.device_bytes(tokens, n) / GB, "GB",
            rest)  # fmt: skip
    say("b", "tokens past which no N_FSDP suffices", "A T / 2 < 95 GB", XXL.most_tokens(), "tokens",
        "half of the activations are whole on every device; " + rest)  # fmt: skip
    for name, mesh in accounting.readings().items():
        chosen = " (our reading)" if mesh == Mesh() else ""
        text = f"axes communicate {name}; M_X and M_Y multiply W_ici{chosen}"
        say("c", "least batch per device", threshold(mesh), mesh.least_tokens(), "tokens", text)
        say("c", "least batch overall", "X Y times that per device", mesh.batch(), "tokens", text)
    for trick in accounting.tricks():
        say("d", f"least batch overall: {trick.name}", trick.formula, trick.overall, "tokens",
            f"price: {trick.price}")  # fmt: skip
    return found


def threshold(mesh: Mesh) -> str:
    """The formula of ``mesh.least_tokens``, with r_n = (n - 1) / n where rings are exact."""
    over, factor = ("r_X α / (M_X Y)", "r_Y ") if mesh.ring else ("α / (M_X Y)", "")
    return over if mesh.combine == "max" else f"{over} / (1 - {factor}α Y / (M_Y F))"


def ring_answer(layer: Layer, n: int) -> list[Answer]:
    """alternate_ring_all_reduce, for the gradients of the layer."""
    size = layer.weight_bytes
    return [
        Answer("alternate_ring_all_reduce", WHOLE, "time", "(N - 1) S / W",
               collectives.alternate_all_reduce_s(size, n, layer.bandwidth), "s",
               _at(layer, f"S {size:.4g} bytes, N {n}") + "; whole tensors, N - 1 rounds"),
    ]  # fmt: skip


def layer_answers(layer: Layer, n: int) -> list[Answer]:
    """data_parallel_calcs, fsdp_calcs and tp_calcs."""
    found = []
    where = _at(layer, f"N {n}")

    def say(question, part, quantity, formula, value, unit, assumption=HANDOUT):
        found.append(Answer(question, part, quantity, formula, value, unit,
                            f"{where}; {assumption}"))  # fmt: skip

    dp, fsdp, tp = (f(layer, n) for f in (parallelism.data_parallel, parallelism.fully_sharded,
                                          parallelism.tensor_parallel))  # fmt: skip
    products = "products alone, two operations a multiply-add"
    say("data_parallel_calcs", "a", "FLOPs backward, per device", "12 B D F / N",
        dp["backward"].flops, "FLOP", products)  # fmt: skip
    say("data_parallel_calcs", "b", "communication backward", "12 (N - 1) D F / (N W)",
        dp["backward"].data_s, "s")  # fmt: skip
    say("data_parallel_calcs", "c", "largest N", "N <= 1 + B W / C",
        parallelism.data_limit(layer), "devices", OVERLAP)  # fmt: skip
    for pass_, flops, seconds in (("backward", "12 B D F / N", "12 (N - 1) D F / (N W)"),
                                  ("forward", "6 B D F / N", "6 (N - 1) D F / (N W)")):  # fmt: skip
        say("fsdp_calcs", "a", f"FLOPs {pass_}, per device", flops, fsdp[pass_].flops, "FLOP",
            products)  # fmt: skip
        say("fsdp_calcs", "b", f"communication {pass_}", seconds, fsdp[pass_].data_s, "s",
            "weights are gathered again in the backward; " + HANDOUT)  # fmt: skip
        say("fsdp_calcs", "c", f"largest N, {pass_}", "N <= 1 + B W / C",
            parallelism.data_limit(layer), "devices", OVERLAP)  # fmt: skip
    say("tp_calcs", "a", "backward", "equations", list(TENSOR_BACKWARD), "equations",
        "dy and x are whole on every device")  # fmt: skip
    for pass_, flops, limit in (("forward", "6 B D F / N", "N <= 1 + 3 F W / (2 C)"),
                                ("backward", "12 B D F / N", "N <= 1 + 3 F W / C")):  # fmt: skip
        say("tp_calcs", "b", f"FLOPs {pass_}, per device", flops, tp[pass_].flops, "FLOP", products)
        say("tp_calcs", "c", f"communication {pass_}", "4 (N - 1) B D / (N W)",
            tp[pass_].tensor_s, "s")  # fmt: skip
        say("tp_calcs", "d", f"largest N, {pass_}", limit, parallelism.tensor_limit(layer, pass_),
            "devices", OVERLAP + "; the batch goes in two or more parts")  # fmt: skip
    questions = ("data_parallel_calcs", "fsdp_calcs", "tp_calcs")
    return sorted(found, key=lambda answer: (questions.index(answer.question), answer.part))


def mesh_answers(layer: Layer, n: int) -> list[Answer]:
    """fsdp_tp_calcs."""
    found = []

    def say(part, quantity, formula, value, unit, assumption):
        found.append(Answer("fsdp_tp_calcs", part, quantity, formula, value, unit, assumption))

    where = _at(layer, f"N_FSDP {n}, N_TP {n}")
    forward = parallelism.fully_sharded_tensor_parallel(layer, n, n)["forward"]
    say("a", "FLOPs forward, per device", "6 B D F / (N_FSDP N_TP)", forward.flops, "FLOP", where)
    say("b", "communication forward",
        "max(6 (N_FSDP - 1) D F, 4 (N_TP - 1) B D) / (N_FSDP N_TP W)",
        max(forward.data_s, forward.tensor_s), "s",
        f"{where}; the axes overlap; {HANDOUT}")  # fmt: skip
    n_fsdp, n_tp = parallelism.data_limit(layer), parallelism.tensor_limit(layer)
    say("c", "largest N_FSDP N_TP", "N <= (1 + B W / C) (1 + 3 F W / (2 C))",
        parallelism.mesh_limit(layer), "devices",
        f"{_at(layer)}; the axes overlap; N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}")  # fmt: skip
    n_fsdp, n_tp = parallelism.shared_mesh_split(layer)
    split = f"N_FSDP {n_fsdp:.4g}, N_TP {n_tp:.4g}"
    say("d", "largest N_FSDP N_TP",
        "N <= (a + b + a b)^2 / (4 a b), a = B W / C, b = 3 F W / (2 C); "
        "where its N_FSDP or N_TP is below 1, N <= 1 + max(a, b)",
        parallelism.shared_mesh_limit(layer), "devices",
        f"{_at(layer)}; the axes share the links; {split}")  # fmt: skip
    return found


def by_question(answers: list[Answer]) -> dict[str, dict[str, list[dict]]]:
    """Question id -> part -> its quantities, for JSON."""
    found: dict[str, dict[str, list[dict]]] = {}
    for answer in answers:
        entry = asdict(answer)
        found.setdefault(entry.pop("question"), {}).setdefault(entry.pop("part"), []).append(entry)
    return found


def _at(layer: Layer, more: str = "") -> str:
    text = (f"at B {layer.tokens} tokens, D {layer.d_model}, F {layer.d_ff}, "
            f"C {layer.flops:.4g} FLOP/s, W {layer.bandwidth:.4g} B/s")  # fmt: skip
    return f"{text}, {more}" if more else text
