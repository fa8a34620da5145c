"""communication_accounting: memory and batch, by hand, by sympy, by search and by a real block."""

import pytest
import torch

from a2lib.theory.accounting import GB, GIB, XXL, Mesh, Stack, tricks

SMALL = Stack(d_model=6, d_ff=10, blocks=3)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def test_parameters_and_state_are_those_of_a_real_stack():
    model = torch.nn.Sequential()
    for _ in range(SMALL.blocks):
        model.append(torch.nn.Linear(SMALL.d_model, SMALL.d_ff, bias=False))
        model.append(torch.nn.Linear(SMALL.d_ff, SMALL.d_model, bias=False))
    parameters = list(model.parameters())
    assert sum(map(torch.numel, parameters)) == SMALL.parameters
    optimizer = torch.optim.AdamW(parameters)
    model(torch.ones(1, SMALL.d_model)).sum().backward()
    optimizer.step()
    gradients, moments = [], []
    for p in parameters:
        gradients.append(p.grad)
        moments += [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
    assert nbytes(moments) == SMALL.state["optimizer"]
    assert nbytes(parameters) + nbytes(gradients) + nbytes(moments) == SMALL.state_bytes


def test_the_handouts_model():
    assert XXL.parameters == 126 * 2 * 16384 * 53248 == 219_848_638_464
    assert XXL.state_bytes == 16 * XXL.parameters
    assert XXL.state_bytes / GIB == 3276  # exactly
    assert -(-XXL.state_bytes // (80 * GB)) == 44
    assert XXL.saved_bytes_per_token == 126 * 2 * (16384 + 53248)


def test_the_least_devices_are_the_first_that_a_count_finds():
    memory = 95 * GB
    for tokens in (0, 1000, 4096, 8192, 10_000):
        n = XXL.least_devices(tokens)
        assert XXL.device_bytes(tokens, n) < memory <= XXL.device_bytes(tokens, n - 1)
    assert XXL.least_devices(0) == 38
    most = XXL.most_tokens()
    assert XXL.least_devices(most) is not None and XXL.least_devices(most + 1) is None
    assert XXL.device_bytes(most + 1, 1e30) >= memory > XXL.device_bytes(most, 1e30)


def test_at_the_least_batch_communication_takes_as_long_as_computation():
    mesh = Mesh()
    least = mesh.least_tokens()
    for factor, bound in ((1.001, False), (0.999, True)):
        seconds = mesh.seconds(XXL, factor * least)
        assert (max(seconds["fsdp"], seconds["tp"]) > seconds["compute"]) == bound
    assert mesh.batch() == pytest.approx(least * 64)


def test_no_split_whose_communication_hides_needs_fewer_tokens_than_the_best():
    best = Mesh().best_tokens()
    for Y in (1, 2, 4, 8, 16, 20, 20.8, 32):
        mesh = Mesh(X=64 / Y, Y=Y)
        least = mesh.least_tokens()
        seconds = mesh.seconds(XXL, least)
        assert least >= best or seconds["tp"] > seconds["compute"]


def test_every_trick_is_what_its_own_mesh_gives():
    base, wide, best, piped, packed = tricks()
    assert base.overall == Mesh().batch()
    alpha = Mesh().alpha
    assert wide.overall == pytest.approx(64 * alpha / 16) and wide.overall < base.overall
    assert best.overall == pytest.approx(64 * alpha**2 / (2 * 53248))
    assert packed.overall == pytest.approx(base.overall / 2)
    # In the backward weights come in one byte and gradients leave in two, for twice the FLOPs.
    seconds = Mesh().seconds(XXL, packed.whole_step / 64)
    assert seconds["fsdp"] * (1 + 2) / 2 == pytest.approx(2 * seconds["compute"])
    assert all(trick.whole_step == trick.overall for trick in (base, wide, best, piped))
    assert XXL.device_bytes(0, 32) > 95 * GB > XXL.device_bytes(0, 64)
    # A pipeline on the clock of one step: a stage of L / 4 blocks is gathered once.
    mesh = Mesh(X=4, Y=4, M_X=1)
    tokens_of_a_replica = piped.overall / 4
    seconds = mesh.seconds(XXL, tokens_of_a_replica / mesh.Y)
    assert seconds["fsdp"] == pytest.approx(seconds["compute"])
