"""What a plan computes with: precision, attention, optimizer, efficiency, by hand and by others."""

import itertools
import math
from dataclasses import replace

import plan_toys
import pytest
import torch
from plan_toys import TINY
from refusals import refused
from torch.utils.flop_counter import FlopCounterMode

from a2lib.model import TransformerLM, cross_entropy
from a2lib.theory import planner
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import OPTIMIZERS, Job
from a2lib.theory.layout_time import block_flops
from a2lib.theory.layouts import Layout, evaluate, memory
from a2lib.theory.memory.saved import block_saved, block_saved_bytes
from a2lib.theory.step_floor import eager_step, score_bytes
from a2lib.theory.transformer import SIZES, GroupedShape, Shape, forward_flops_by_part

TOY = replace(plan_toys.TOY, fp32=100.0)
ALONE, PAIR = Layout(sharding="none"), Layout(data=2, sharding="none")
AGAIN = Layout(sharding="none", checkpointing="block")


def job(devices=8, batch=1, context=4, shape=TINY, device=TOY, **more):
    return Job(shape, device, devices, batch, context, 0.0, **more)


# In fp32 a token leaves 2 (16 + 4 + 16) + 16 (norms' results) * 2 = 104 bytes whole; q, k, v and
# the heads' results 64, the FFN's hidden 96 and flash's log-sum-exp 8: 168 that are cut. The head
# and the last norm have 44 parameters, a block 144, the embedding 40, which autocast does not copy.
@pytest.mark.parametrize("one, layout, moment, components", [
    (job(precision="fp32"), ALONE, "loss", {
        "parameters": 1488, "optimizer": 2976,
        "activations": 2 * 4 * 272 + 4 * 32, "temporaries": 12 * 4 * 10}),
    # the residual's gradients and three of the hidden, in fp32
    (job(precision="fp32", optimizer="momentum"), AGAIN, "last block's backward", {
        "parameters": 1488, "gradients": 4 * 188, "optimizer": 1488,
        "activations": 4 * 16, "temporaries": 4 * 272 - 64 + 4 * (32 + 72)}),
    # eight scores a token, in 4 bytes for the softmax and 2 for the product, and a mask of 16
    # bytes; three matrices of scores weigh more than three of the hidden. No log-sum-exp.
    (job(attention="eager", optimizer="sgd"), ALONE, "loss", {
        "parameters": 1488, "working weights": 2 * 332,
        "activations": 2 * (4 * 240 + 16) + 160, "temporaries": 480}),
    (job(attention="eager", optimizer="sgd"), AGAIN, "last block's backward", {
        "parameters": 1488, "gradients": 4 * 188, "working weights": 2 * 144,
        "activations": 4 * 16, "temporaries": 4 * 240 + 16 - 64 + 4 * (24 + 96)}),
    # so few tokens that gradients outweigh them; then so long that scores outweigh the logits
    (job(context=1), ALONE, "after the backward", {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976}),
    (job(context=16, attention="eager"), ALONE, "first block's backward", {
        "parameters": 1488, "gradients": 4 * 44, "optimizer": 2976, "working weights": 2 * 288,
        "activations": 2 * (16 * 384 + 256), "temporaries": 16 * (24 + 384)}),
    # gradients that are added to are there from the beginning
    (job(batch=2), replace(ALONE, microbatches=2), "accumulating", {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * 4 * 200 + 160, "temporaries": 480}),
    # replicas keep everything; a sharded optimizer without autocast keeps the weights too
    (job(batch=2), PAIR, "loss", {
        "parameters": 1488, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * 4 * 200 + 160, "temporaries": 480}),
    (job(batch=2, precision="fp32"), Layout(data=2, sharding="zero1"), "loss", {
        "parameters": 1488, "optimizer": 1488,
        "activations": 2 * 4 * 272 + 4 * 32, "temporaries": 480}),
    # 144 parameters of a block, three times in fp32
    (job(batch=2, precision="fp32", optimizer="adamw-8bit"), Layout(data=2), "loss", {
        "parameters": 744, "optimizer": 372, "working weights": 1728,
        "activations": 2 * 4 * 272 + 4 * 32, "temporaries": 480}),
])  # fmt: skip
def test_memory_by_hand(one, layout, moment, components):
    plan = evaluate(one, layout)
    assert (plan.moment, plan.memory) == (moment, plan_toys.NOTHING | components)


def test_workspaces_are_of_the_device():
    kept = replace(TOY, workspace=100.0)
    for one in (ALONE, AGAIN, Layout(sharding="none", microbatches=2)):
        (_, without), (_, held) = (memory(job(batch=2, device=d), one) for d in (TOY, kept))
        assert held == without | {"temporaries": without["temporaries"] + 100}
    assert {name for name, d in DEVICES.items() if d.workspace} == {"H100", "H200", "H800", "B200"}
    refused("workspace is -1; allowed are numbers from 0", replace, TOY, workspace=-1)


@pytest.mark.parametrize("optimizer, numbers", [("adamw", 7), ("momentum", 5), ("sgd", 3)])
def test_an_optimizer_reads_and_writes_what_it_keeps(optimizer, numbers):
    slow = job(device=replace(TOY, flops=1e30, memory_bandwidth=1.0), optimizer=optimizer)
    weights = 3 * 2 * 372
    assert evaluate(slow, ALONE).busy["memory bandwidth"] == weights + numbers * 4 * 372
    assert OPTIMIZERS[optimizer] == 4 * (numbers - 3) / 2
    # a replica updates all of it, a sharded optimizer its part
    shared = replace(slow, batch=2)
    alone = evaluate(shared, PAIR).busy["memory bandwidth"]
    cut = evaluate(shared, Layout(data=2, sharding="zero1")).busy["memory bandwidth"]
    assert alone - cut == numbers * 4 * 372 / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_moves_the_scores_that_its_kernels_do(precision):
    shape, batch, context = SIZES["small"], 2, 4096  # so long that scores outweigh the rest
    moved = {"forward": 0, "backward": 0}
    for one in eager_step(shape, batch, context, precision):
        if one.part == "attention":
            moved[one.phase] += (one.read + one.written) * one.count
    scores = shape.num_layers * batch * shape.num_heads * context**2
    for bytes_, (phase, total) in zip(score_bytes(precision), moved.items(), strict=True):
        assert bytes_ == pytest.approx(total / scores, rel=0.1), phase
        assert bytes_ < total / scores
    one = job(batch=batch, context=context, shape=shape, attention="eager", precision=precision)
    slow = replace(one, device=replace(TOY, memory_bandwidth=1.0))
    flash = replace(slow, attention="flash")
    forward, backward = score_bytes(precision)
    for layout, times in ((ALONE, forward + backward), (AGAIN, 2 * forward + backward)):
        more, less = (evaluate(one, layout).busy["memory bandwidth"] for one in (slow, flash))
        assert more - less == pytest.approx(scores * times)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_a_block_keeps_what_saved_has_but_the_weights(precision, attention):
    shape, batch, context = SIZES["small"], 3, 64
    one = job(shape=shape, context=context, precision=precision, attention=attention)
    found = block_saved(shape, 1, 1, attention, precision).items()
    copies = sum(size for name, size in found if name.endswith(".16"))
    kept = block_saved_bytes(shape, batch, context, attention, precision) - copies
    mask = context**2 if attention == "eager" else 0
    assert sum(one.saved) * batch * context + mask == kept


def test_fused_kernels_keep_what_korthikanti_et_al_count():
    """Their 34 s b h + 5 a s s b (table 2) less three masks of dropout and its result, for a GELU
    FFN of two matrices of 4 h; ours has three of d_ff. Cut over t devices it is a t-th of that."""
    shape, context = Shape(1024, 4096, 1, 16), 512
    theirs = 34 * 1024 - 2 * 1024 + (6 - 4) * 4096
    flash, eager = (
        job(shape=shape, context=context, attention=attention, activations="fused")
        for attention in ("flash", "eager")
    )
    assert sum(flash.saved) == theirs + 4 * 16 + 8  # log-sum-exps and roots
    whole, scores = sum(eager.saved), 2 * 16 * 512
    assert whole == theirs + scores + 8
    keeps = {"none": whole, "block": 2 * 1024, "selective": whole - scores}
    for checkpointing, kept in keeps.items():
        for t in (1, 2, 8):
            cut = Layout(tensor=t, microbatches=2, checkpointing=checkpointing)
            found = evaluate(replace(eager, batch=2), cut).memory["activations"]
            mask = context**2 if checkpointing == "none" else 0
            assert found == pytest.approx(mask + context * (kept + 4 * 1024) / t)
    wide = job(shape=shape, context=context, precision="fp32", activations="fused")
    assert sum(wide.saved) == 2 * theirs + 4 * 16 + 8


def test_latents_keep_what_autograd_saves_of_their_norms():
    shape = GroupedShape(16, 32, 1, 2, 64, head_size=4, q_rank=6, kv_rank=10)
    x, weights = torch.randn(5, 16), {n: torch.randn(n, 16) for n in (6, 10)}
    heads = {n: torch.randn(8, n, requires_grad=True) for n in weights}
    kept = {}

    def keep(tensor):
        if tensor.dtype.is_floating_point and tensor.shape in ((5, 6), (5, 10)):
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for n, down in weights.items():
            latent = x @ down.requires_grad_().T
            torch.nn.functional.rms_norm(latent, (n,), torch.ones(n)) @ heads[n].T
    plain = replace(shape, q_rank=0, kv_rank=0)
    for activations in ("library", "fused"):
        more, less = (
            sum(job(shape=one, activations=activations, precision="fp32").saved)
            for one in (shape, plain)
        )
        assert 5 * (more - less) == 4 * sum(tensor.numel() for tensor in kept.values())


def test_what_is_not_trained_has_neither_gradient_nor_state_nor_products_for_them():
    """Half of each matrix, held against a model of which w1 and w3 make no gradients."""
    shape, context = Shape(16, 24, 2, 2, 40), 8
    model = TransformerLM(40, context, 16, 2, 2, 24)
    tokens = torch.zeros(1, context, dtype=torch.int64)

    def flops():
        with FlopCounterMode(display=False) as counted:
            cross_entropy(model(tokens), tokens).backward()
        return counted.get_total_flops()

    whole = flops()
    for layer in model.layers:
        for matrix in (layer.ffn.w1, layer.ffn.w3):
            matrix.weight.requires_grad_(False)
    share = 2 * 16 * 24 / shape.block_matrices
    one = job(shape=shape, context=context, attention="eager", efficiency=1.0)
    some = replace(one, frozen=share)
    saved = 2 * (block_flops(one, context, "none") - block_flops(some, context, "none"))
    assert saved == pytest.approx(whole - flops())
    for sharding in ("none", "zero1", "zero2", "fsdp", "hsdp"):
        layout = Layout(data=8, sharding=sharding, microbatches=2)
        all_of_it, half = (
            evaluate(replace(one, batch=16, frozen=part), layout) for part in (0, 0.5)
        )
        for name in ("gradients", "optimizer"):
            assert half.memory[name] == all_of_it.memory[name] / 2
        for name in ("parameters", "activations"):
            assert half.memory[name] == all_of_it.memory[name]
        # of one all-reduce, of zero's scatter and gather half; of fsdp's three rings half of one
        ratio = half.busy["node links"] / all_of_it.busy["node links"]
        assert ratio == pytest.approx(5 / 6 if sharding in ("fsdp", "hsdp") else 1 / 2)
        assert half.step_s < all_of_it.step_s


def test_selective_computes_the_scores_again_and_no_product():
    one = job(batch=2, context=64, attention="eager", efficiency=1.0)
    layouts = [replace(ALONE, checkpointing=name) for name in ("none", "selective", "block")]
    flops = [TOY.flops * evaluate(one, layout).busy["computation"] for layout in layouts]
    parts = forward_flops_by_part(TINY, 2, 64)
    assert flops[1] - flops[0] == pytest.approx(parts["attention"])
    assert flops[2] - flops[1] == pytest.approx(parts["projections"] + parts["ffn"] * 2 / 3)


LAYOUTS = ALONE, PAIR, Layout(data=2, microbatches=3)
HELD = [*itertools.product(LAYOUTS, ("eager", "flash")), (Layout(context=2), "flash")]


@pytest.mark.parametrize("layout, attention", HELD)
def test_one_sequence_more_than_the_largest_batch_does_not_fit(layout, attention):
    small = replace(TOY, memory=40_000.0)
    unit = layout.data * layout.microbatches
    one = job(batch=unit, device=small, attention=attention, optimizer="sgd")
    batches = [unit * k for k in range(1, 60)]
    fit = [b for b in batches if evaluate(replace(one, batch=b), layout).memory_bytes <= one.memory]
    assert planner.largest_batch(one, layout) == max(fit) < max(batches)
    assert fit == batches[: len(fit)]
    # whatever the job's own batch is, and none where the state alone is too much
    assert planner.largest_batch(replace(one, batch=40 * unit), layout) == max(fit)
    assert planner.largest_batch(replace(one, device=replace(TOY, memory=1e3)), layout) == 0


def test_what_is_not_allowed_is_one_line():
    refused("precision 'fp16': allowed are fp32, bf16", job, precision="fp16")
    refused("attention 'flex': allowed are eager, flash", job, attention="flex")
    refused("optimizer 'adam': allowed are adamw, adamw-8bit, momentum", job, optimizer="adam")
    for wrong in (0, math.nan, 1.01):
        refused(f"efficiency is {wrong}; allowed are numbers above 0 to 1", job, efficiency=wrong)
    tpu = {"precision": "fp32", "device": DEVICES["TPU-v5p"]}
    refused("precision fp32: allowed is bf16 on google-tpu-v5p", job, **tpu)
    ring, eager = Layout(context=2), job(attention="eager")
    refused("context 2 with eager attention; allowed is 1", evaluate, eager, ring)
    refused("data 2 does not divide batch 1; it must", planner.largest_batch, job(), PAIR)
