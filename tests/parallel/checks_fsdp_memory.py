"""FSDP's account of what it holds, against the theory."""

import copy
from collections import Counter
from unittest.mock import patch

import torch
from checking import (
    backward_of_each,
    check,
    losses_of,
    output_square,
    token_batches,
    token_loss,
)
from checks_fsdp import BOTH, check_gradients
from torch import nn

from a2lib.model import TransformerLM
from a2lib.parallel import FSDP
from a2lib.parallel.fsdp.transfers import Alike
from a2lib.parallel.fsdp.units import MOMENTS
from a2lib.shapes import Shape
from a2lib.theory import fsdp as theory

SHAPE = Shape(8, 16, 4, 2, vocab_size=12)
PARTS = "parameters", "gradients", "gathered", "travelling"


class Watch:
    """Keeps what an FSDP tells of a step, and what it holds meanwhile."""

    def __init__(self, fsdp):
        self.fsdp = fsdp
        self.told = []
        # Where a unit begins to compute, by part; and where its gradients are cast.
        self.computing, self.casting = [], []

    def look(self, moment, unit):
        self.told.append((moment, unit))
        if moment == "computes":
            held = self.fsdp.held_bytes()
            del held["shared"]
            self.computing.append(held)

    def step(self, tokens):
        prepare = Alike.prepare

        def watched(alike, as_slots):
            self.casting.append(self.fsdp.held_bytes()["gathered"])
            return prepare(alike, as_slots)

        self.fsdp.observe(self.look)
        with patch.object(Alike, "prepare", watched):
            token_loss(self.fsdp(tokens), tokens).backward()
            self.fsdp.observe(None)
            self.fsdp.finish_gradient_synchronization()


@check(2)
def fsdp_holds_what_the_theory_says():
    """When each unit begins, in forward and backward of a second step."""
    for dtype, width in ((None, 4), (torch.bfloat16, 2)):
        watch = watched_second_step(dtype)
        assert watch.fsdp.held_bytes()["parameters"] == theory.kept(SHAPE, 2)
        assert watch.fsdp.held_bytes()["gradients"] == theory.kept(SHAPE, 2)
        computing, casting = [], []
        for moment in theory.step(SHAPE, 2, 0, width, moments=False):
            if moment.moment.startswith(("forward", "backward")):
                parts = dict(moment.parts)
                computing.append({part: parts[part] for part in PARTS})
            elif moment.moment.startswith("sent"):
                # Of a unit whose gradients are cast the weights are gone.
                casting.append(moment.gathered)
        assert watch.computing == computing, (watch.computing, computing)
        assert watch.casting == casting, (watch.casting, casting)


def watched_second_step(dtype=None):
    model = TransformerLM(12, 8, 8, 4, 2, 16, attention="eager", seed=0)
    fsdp = FSDP(model, compute_dtype=dtype)
    tokens = token_batches(1)[0]
    token_loss(fsdp(tokens), tokens).backward()
    fsdp.finish_gradient_synchronization()
    fsdp.zero_grad()
    watch = Watch(fsdp)
    watch.step(tokens)
    return watch


@check(2)
def fsdp_gathers_ahead_and_sends_at_once():
    told = watched_second_step().told
    count = Counter(moment for moment, _ in told)
    assert count.keys() == set(MOMENTS)
    assert count["turn"] == count["computes"] == 10
    # The root and the last block are gathered once; all gradients leave.
    assert count["gather begins"] == count["gather ends"] == 8, count
    assert count["reduce begins"] == count["reduce ends"] == 5, count
    # The root's leave before the first block's.
    assert told.index(("reduce begins", "")) < told.index(("reduce begins", "layers.0")), told
    for i in range(3):
        ahead = told.index(("gather begins", f"layers.{i + 1}"))
        assert ahead < told.index(("computes", f"layers.{i}")), told


class Layers(nn.Module):
    """Runs its layers in ``order``, of which it knows nothing when it is wrapped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(6):
            self.layers.append(nn.Linear(8, 8))
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
    losses = losses_of(output_square, torch.randn(2, 4, 8))
    most = []
    for order in ([5, 4, 3, 2, 1, 0], [0, 2, 3, 5, 1, 4], [0, 1, 0, 1], [0, 1, 2], range(6)):
        reference.order = fsdp.module.order = order
        held.clear()
        fsdp.observe(lambda moment, unit: held.append(fsdp.held_bytes()["gathered"]))
        backward_of_each(fsdp, reference, losses)
        fsdp.observe(None)
        check_gradients(fsdp, reference, str(order))
        fsdp.zero_grad()
        most.append(max(held) / whole)
    assert most == [1, 2, 2, 2, 2], most
