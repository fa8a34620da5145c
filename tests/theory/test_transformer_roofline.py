"""The floor's list of kernels against the operators of the real model."""

from collections import Counter

import pytest
import torch
from cuda_casts import as_cuda_casts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from a2lib.model import TransformerLM, cross_entropy
from a2lib.report.metrics import moved_bytes
from a2lib.shapes import Shape
from a2lib.theory import transformer
from a2lib.theory.attention import attention_flops
from a2lib.theory.roofline import PARTS, PRECISIONS, Kernel, floor
from a2lib.theory.step_floor import eager_step, fused_step
from a2lib.theory.transformer import forward_flops_by_part

SHAPE = Shape(d_model=12, d_ff=20, num_layers=2, num_heads=3, vocab_size=17)
BATCH, CONTEXT = 2, 5
PHASES = ("forward", "loss", "backward", "optimizer")
STEPS = (eager_step, fused_step)


def moved(tensors):
    """Bytes of the elements that are there: an expanded dimension is read once."""
    total = 0
    for x in tensors:
        size = x.element_size()
        for length, stride in zip(x.shape, x.stride(), strict=True):
            size *= length if stride else 1
        total += size
    return total


def tensors_in(tree):
    return list(filter(torch.is_tensor, tree_leaves(tree)))


def storage(tensor):
    return tensor.untyped_storage()._cdata


class Operators(TorchDispatchMode):
    """Counts (bytes read, bytes written) of every kernel that the operators are on CUDA."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::").split(".")[0]
        self.found.update(self.kernels(name, tensors_in((args, kwargs)), tensors_in(result)))
        return result

    def kernels(self, name, ins, outs):
        read, written = moved(ins), moved(outs)
        if name == "_fused_adamw_":
            states = ins[: len(ins) // 5 * 4]  # weights, gradients, moments; then the counters
            return [(moved(states), moved(states) * 3 // 4)]
        if name == "_foreach_add_":
            return [(read, read)]
        if name in ("cat", "stack") and outs[0].dim() > 4:
            sizes = list(map(moved, zip(ins, strict=True)))
            return list(zip(sizes, sizes, strict=True))
        if name == "ones_like":
            return [(0, written)]
        if name == "embedding":
            return [(moved(ins[1:]) + written, written)]
        if name == "embedding_dense_backward":
            return [(0, written), (read, moved(ins[:1]))]
        if name == "masked_fill":
            return [(moved(ins[:1]), written), (written + moved(ins[1:2]), written)]
        if name == "_softmax_backward_data":
            return [(read, written), (read, written)]
        if name == "nll_loss_forward":
            return [(moved(ins[1:]) + 4 * ins[1].numel(), written)]
        if name == "nll_loss_backward":
            gradient, _, targets, total = ins
            return [(0, written), (moved([gradient, targets, total]), 4 * targets.numel())]
        is_view = {storage(x) for x in ins} >= {storage(x) for x in outs}
        if is_view or name.startswith(("empty", "new_empty", "profiler")):
            return []
        return [(read, written)]


# So wide and long that what is a few numbers a token is little.
LARGE, LARGE_BATCH, LARGE_CONTEXT = Shape(512, 1024, 2, 4, vocab_size=2000), 2, 512


def fake_model():
    """Return the model with fake weights and tables on the CPU; where a FakeTensorMode is on."""
    model = TransformerLM.from_size(LARGE, LARGE_CONTEXT, device="meta")
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="cpu")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return model


def operators_of_a_step(precision):
    with FakeTensorMode():
        model = fake_model()
        if precision == "bf16":
            for layer in model.layers:
                layer.attn.attention = as_cuda_casts
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(LARGE_BATCH, LARGE_CONTEXT, dtype=torch.long)

        def step():
            counts = {phase: Operators() for phase in PHASES}
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                with counts["forward"]:
                    logits = model(tokens)
                with counts["loss"]:
                    loss = cross_entropy(logits, tokens)
            with counts["backward"]:
                loss.backward()
            with counts["optimizer"]:
                optimizer.step()
            optimizer.zero_grad()
            return counts

        step()  # makes the optimizer's state
        return step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_kernels_move_what_the_operators_of_the_model_do(precision):
    operators = operators_of_a_step(precision)
    kernels = eager_step(LARGE, LARGE_BATCH, LARGE_CONTEXT, precision)
    for phase in PHASES:
        want = 0
        for (read, written), count in operators[phase].found.items():
            want += (read + written) * count
        counted = moved_bytes(kernel for kernel in kernels if kernel.phase == phase)
        assert counted == pytest.approx(want, rel=0.01), phase


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_operations_are_those_of_the_step(step, precision):
    """Which test_transformer_counts.py holds against a counter."""
    floors = floor(step(SHAPE, BATCH, CONTEXT, precision), 1e12, 1e12)
    scores = 3 * forward_flops_by_part(SHAPE, BATCH, CONTEXT)["attention"]
    assert floors["products"].flops == transformer.step_flops(SHAPE, BATCH, CONTEXT) - scores
    sizes = (BATCH, SHAPE.num_heads, CONTEXT, CONTEXT, SHAPE.head_dim)
    tiled = SHAPE.num_layers * attention_flops(*sizes, True, "end_to_end")
    assert floors["attention"].flops == (scores if step is eager_step else tiled)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_products_move_each_matrix_once(precision):
    """By the modules: those that share an input are one product, gradients of weights float32."""
    narrow, rows = 2 if precision == "bf16" else 4, BATCH * CONTEXT
    model = TransformerLM.from_size(SHAPE, CONTEXT, device="meta")
    groups = [[model.lm_head]]
    for layer in model.layers:
        attn, ffn = layer.attn, layer.ffn
        groups += [[attn.q_proj, attn.k_proj, attn.v_proj], [attn.output_proj]]
        groups += [[ffn.w1, ffn.w3], [ffn.w2]]
    want = 0
    for group in groups:
        inputs, outputs = group[0].in_features, 0
        for linear in group:
            outputs += linear.out_features
        x, weights, y = rows * inputs, inputs * outputs, rows * outputs
        # Forward, gradient of the weights, gradient of the input.
        want += narrow * (x + weights + y) + narrow * (x + y) + 4 * weights
        want += narrow * (y + weights + x)
    kernels = fused_step(SHAPE, BATCH, CONTEXT, precision)
    assert floor(kernels, 1.0, 1.0)["products"].bytes == want


def test_a_kernel_takes_the_longer_of_its_two_times():
    kernels = [
        Kernel("forward", "products", "a", 40, flops=100, count=2),  # 10 s, 4 s
        Kernel("backward", "attention", "b", 50, flops=20),  # 2 s, 5 s
    ]
    floors = floor(kernels, 10.0, 10.0)
    assert [floors[part].ms for part in PARTS] == [20_000, 5_000, 0, 0, 0]
    total = floors["total"]
    assert (total.flops, total.bytes, total.ms) == (220, 130, 25_000)
