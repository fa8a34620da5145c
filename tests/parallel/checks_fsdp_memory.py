"""FSDP's account of what it holds, against the theory."""

import copy
from collections import Counter
from unittest.mock import patch

import torch
from checking import backward_of_each, check, same, token_batches, token_loss
from checks_fsdp import BOTH
from torch import nn

from a2lib.model import TransformerLM
from a2lib.parallel import FSDP
from a2lib.parallel.fsdp.transfers import Alike
from a2lib.parallel.fsdp.units import MOMENTS
from a2lib.shapes import Shape
from a2lib.theory import fsdp as theory


@check(2)
def fsdp_holds_what_the_theory_says():
    """When each unit begins, in forward and backward of a second step; and what is told of it."""
    shape = Shape(8, 16, 4, 2, vocab_size=12)
    tokens = token_batches(1)[0]
    for dtype, computes in ((None, 4), (torch.bfloat16, 2)):
        model = TransformerLM(12, 8, 8, 4, 2, 16, attention="eager", seed=0)
        fsdp, told, held, casting = FSDP(model, compute_dtype=dtype), [], [], []
        assert fsdp.held_bytes()["parameters"] == theory.kept(shape, 2)
        token_loss(fsdp(tokens), tokens).backward()
        fsdp.finish_gradient_synchronization()
        fsdp.zero_grad()

        def look(moment, unit, fsdp=fsdp, told=told, held=held):
            told.append((moment, unit))
            if moment == "computes":
                held.append({part: n for part, n in fsdp.held_bytes().items() if part != "shared"})

        def watched(alike, as_slots, fsdp=fsdp, casting=casting, prepare=Alike.prepare):
            casting.append(fsdp.held_bytes()["gathered"])
            return prepare(alike, as_slots)

        fsdp.observe(look)
        with patch.object(Alike, "prepare", watched):
            token_loss(fsdp(tokens), tokens).backward()
            fsdp.observe(None)
            fsdp.finish_gradient_synchronization()
        gradients = fsdp.held_bytes()["gradients"]
        walk = list(theory.step(shape, 2, 0, computes, moments=False))
        expected = [m.parts for m in walk if m.moment.startswith(("forward", "backward"))]
        parts = ("parameters", "gradients", "gathered", "travelling")
        assert held == [{part: m[part] for part in parts} for m in expected], (held, expected)
        # Of a unit whose gradients are cast the weights are gone.
        sent = [m.gathered for m in walk if m.moment.startswith("sent")]
        assert casting == sent, (casting, sent)
        assert gradients == theory.kept(shape, 2)
        count = Counter(moment for moment, _ in told)
        assert count.keys() == set(MOMENTS)
        assert count["turn"] == count["computes"] == 10
        # The root and the last block are gathered once; all gradients leave, the root's at the end.
        assert count["gather begins"] == count["gather ends"] == 8, count
        assert count["reduce begins"] == count["reduce ends"] == 5, count
        # The root's leave before the first block's.
        assert [u for m, u in told if m == "reduce begins"][-2:] == ["", "layers.0"], told
        ahead = [told.index(("gather begins", f"layers.{i}")) for i in range(4)]
        begun = [told.index(("computes", f"layers.{i}")) for i in range(3)]
        assert all(a < b for a, b in zip(ahead[1:], begun, strict=True)), told


class Layers(nn.Module):
    """Runs its layers in ``order``, of which it knows nothing when it is wrapped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.order = range(6)

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


@check(2)
def fsdp_holds_two_units_whatever_the_order():
    """Backwards, with gaps, twice, part of them; then in order again, gathered ahead again."""
    for make in BOTH:
        hold_two_units_whatever_the_order(make)


def hold_two_units_whatever_the_order(make):
    reference = Layers()
    fsdp, held = make(copy.deepcopy(reference)), []
    whole = reference.layers[0].weight.nbytes
    batches = torch.randn(2, 4, 8)
    most = []
    for order in ([5, 4, 3, 2, 1, 0], [0, 2, 3, 5, 1, 4], [0, 1, 0, 1], [0, 1, 2], range(6)):
        reference.order = fsdp.module.order = order
        held.clear()
        fsdp.observe(lambda moment, unit: held.append(fsdp.held_bytes()["gathered"]))
        losses = [lambda module, x=x: module(x).square().sum() for x in batches]
        backward_of_each(fsdp, reference, losses)
        fsdp.observe(None)
        for p, q in zip(fsdp.parameters(), reference.parameters(), strict=True):
            if q.grad is not None:
                same(p.grad, q.grad.chunk(2)[fsdp.rank] if q.dim() == 2 else q.grad)
            assert (p.grad is None) == (q.grad is None)
        fsdp.zero_grad()
        most.append(max(held) / whole)
    assert most == [1, 2, 2, 2, 2], most
