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


def test_half_of_the_overlap_asks_for_more_tokens():
    mesh = Mesh()
    least = mesh.least_tokens()
    assert mesh.rate(XXL, least) == pytest.approx(2 / 3) and mesh.tokens_for(XXL, 2 / 3) == least
    for share in (0.7, 0.8, 0.9):
        tokens = mesh.tokens_for(XXL, share)
        seconds = mesh.seconds(XXL, tokens)
        assert seconds["fsdp"] > seconds["tp"]
        block = seconds["compute"] + seconds["fsdp"] / 2
        assert seconds["compute"] / block == pytest.approx(share)
        assert mesh.rate(XXL, tokens) == pytest.approx(share)
    assert mesh.tokens_for(XXL, 0.9) * 64 == pytest.approx(92_000)
    # Below the threshold communication is the longer part.
    seconds = mesh.seconds(XXL, least / 2)
    block = seconds["fsdp"] + seconds["compute"] / 2
    assert mesh.rate(XXL, least / 2) == pytest.approx(seconds["compute"] / block)


def test_a_step_hides_as_much_as_its_two_passes():
    mesh, tokens = Mesh(), 800
    seconds = mesh.seconds(XXL, tokens)
    # In bf16 either pass sends as much for its FLOPs; one byte less is sent in both passes.
    assert mesh.step_rate(XXL, tokens) == pytest.approx(mesh.rate(XXL, tokens))
    saved = seconds["fsdp"]
    spent = 3 * seconds["compute"] + 3 * seconds["fsdp"] / 2 - saved / 2
    assert mesh.step_rate(XXL, tokens, gathered=1) == pytest.approx(3 * seconds["compute"] / spent)


def test_tensor_parallelism_and_the_bubble_keep_the_rate_below_ninety_percent():
    base, wide, _, piped, packed = tricks()
    mesh = Mesh(X=4, Y=16, M_X=1, M_Y=2)
    assert wide.most_rate == pytest.approx(mesh.rate(XXL, 1e9))
    assert wide.most_rate < 0.9
    assert wide.for_90 == piped.for_90 == float("inf")
    assert piped.most_rate == pytest.approx(4 / 7 * Mesh().rate(XXL, 1e9))
    assert packed.for_90 == pytest.approx(base.for_90 / 2)


def test_a_device_of_the_mesh_holds_its_part_of_everything():
    mesh = Mesh()
    blocks = 126
    replica = 1600 / 16
    saved = 2 * blocks * (16384 + 53248) * replica
    gathered = 2 * 2 * 2 * 16384 * 53248 / 4
    expected = XXL.state_bytes / 64 + saved / 2 + saved / 2 / 4 + gathered
    assert mesh.device_bytes(XXL, 1600) == pytest.approx(expected)
    base, wide, _, piped, packed = tricks()
    assert all(way.device_bytes < 95 * GB for way in (base, wide, piped, packed))
    # With stages the gathered weights of a quarter of the layers stay, and as much of the tokens.
    stage = saved / 4 * (piped.overall / 4) / replica
    weights = 2 * XXL.parameters / 4 / 4
    expected = XXL.state_bytes / 64 + stage / 2 + stage / 2 / 4 + weights
    assert piped.device_bytes == pytest.approx(expected)
    # More tokens than fit would be needed for 90 % of the compute rate.
    # That is not so with weights in 8 bits.
    assert mesh.device_bytes(XXL, packed.for_90) < 95 * GB < mesh.device_bytes(XXL, base.for_90)
