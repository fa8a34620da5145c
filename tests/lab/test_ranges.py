"""Which range each operation of a forward is launched in."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from a2lib.lab.ranges import annotate
from a2lib.model import TransformerLM, cross_entropy

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
LINEAR = "attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3".split()


class Recorder:
    """Stands for a profiler's range: the open ones, and all there were, each by its path."""

    def __init__(self):
        self.open, self.paths = [], []

    @contextlib.contextmanager
    def __call__(self, name):
        self.open.append(name)
        self.paths.append("/".join(self.open))
        yield
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
def test_annotating_changes_no_bit(tokens, attention):
    plain, annotated = build(attention), build(attention)
    recorder = Recorder()
    annotate(annotated, recorder)
    want, found = step(plain, tokens), step(annotated, tokens)
    assert recorder.paths and not recorder.open
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


def test_every_product_lies_in_the_range_of_its_part(tokens):
    model, recorder = build(), Recorder()
    annotate(model, recorder)
    with Launches(recorder) as launches:
        model(tokens)
    products = Counter(inside for operator, inside in launches.seen if operator in PRODUCTS)
    parts = [*LINEAR, "attn.attention.scores", "attn.attention.values"]
    names = [f"layers.{i}.{part}" for i in range(3) for part in parts] + ["lm_head"]
    assert products == dict.fromkeys(names, 1)
    softmaxes = [inside for operator, inside in launches.seen if operator == "_softmax"]
    assert softmaxes == [f"layers.{i}.attn.attention.softmax" for i in range(3)]
    assert recorder.open == []
