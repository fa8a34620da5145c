"""Which range each operation is launched in, forward and backward, with a recorder for NVTX."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from a2lib.lab.ranges import annotate
from a2lib.model import TransformerLM, cross_entropy

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
LINEAR = "attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3".split()


class Recorder:
    """Stands for torch.cuda.nvtx: the open ranges, and all there were, each by its path."""

    def __init__(self):
        self.open, self.paths = [], []

    def range_push(self, name):
        self.open.append(name)
        self.paths.append("/".join(self.open))

    def range_pop(self):
        self.open.pop()


class Launches(TorchDispatchMode):
    """(operator, innermost open range) of everything that is computed."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.seen = recorder, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        innermost = self.recorder.open[-1] if self.recorder.open else ""
        self.seen.append((func.overloadpacket.__name__, innermost))
        return func(*args, **(kwargs or {}))


def build(attention="eager"):
    return TransformerLM(19, 12, 24, 3, 2, 40, attention=attention, seed=0)


@pytest.fixture
def tokens():
    return torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(0))


def step(model, tokens):
    logits = model(tokens)
    cross_entropy(logits, tokens).backward()
    return {"logits": logits} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["eager", "sdpa_math"])
def test_annotating_changes_nothing(tokens, attention):
    """Of the forward no bit; gradients but for the order in which those that meet are added."""
    plain, annotated = build(attention).double(), build(attention).double()
    recorder = Recorder()
    annotate(annotated, recorder)
    want, found = step(plain, tokens), step(annotated, tokens)
    assert recorder.paths and not recorder.open
    assert torch.equal(found.pop("logits"), want.pop("logits"))
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


def test_every_product_lies_in_the_range_of_its_part(tokens):
    model, recorder = build(), Recorder()
    annotate(model, recorder)
    with Launches(recorder) as launches:
        logits = model(tokens)
        n_forward = len(launches.seen)
        cross_entropy(logits, tokens).backward()

    def products(seen):
        return Counter(inside for operator, inside in seen if operator in PRODUCTS)

    parts = [*LINEAR, "attn.attention.scores", "attn.attention.values"]
    names = [f"layers.{i}.{part}" for i in range(3) for part in parts] + ["lm_head"]
    assert products(launches.seen[:n_forward]) == dict.fromkeys(names, 1)
    assert products(launches.seen[n_forward:]) == {f"{name}.bwd": 2 for name in names}
    softmax = [
        (op, inside) for op, inside in launches.seen if "softmax" in op and "layer" in inside
    ]
    parts = [f"layers.{i}.attn.attention.softmax" for i in range(3)]
    want = [("_softmax", part) for part in parts]
    want += [("_softmax_backward_data", f"{part}.bwd") for part in parts[::-1]]
    assert softmax == want
    assert recorder.open == []
