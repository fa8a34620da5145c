"""One layer on N devices: formulas against the handout's, against real products, and by search."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from a2lib.theory import parallelism
from a2lib.theory.collectives import all_gather_s
from a2lib.theory.parallelism import Layer

B, D, F, C, W, N = sympy.symbols("B D F C W N", positive=True)
SYMBOLIC = Layer(B, D, F, C, W)


def same(one, other):
    return sympy.simplify(one - other) == 0


@pytest.mark.parametrize("way", ["data_parallel", "fully_sharded", "tensor_parallel"])
@pytest.mark.parametrize("pass_, products", [("forward", 6), ("backward", 12)])
def test_one_axis_is_the_handouts_and_its_limit_where_both_take_as_long(way, pass_, products):
    cost = getattr(parallelism, way)(SYMBOLIC, N)[pass_]
    assert same(cost.flops, products * B * D * F / N)
    if way == "tensor_parallel":
        assert cost.data_s == 0 and same(cost.tensor_s, 4 * (N - 1) * B * D / (N * W))
        limit = parallelism.tensor_limit(SYMBOLIC, pass_)
        assert same(limit, 1 + products * F * W / (4 * C))
    else:
        sent = 0 if (way, pass_) == ("data_parallel", "forward") else products
        assert cost.tensor_s == 0 and same(cost.data_s, sent * (N - 1) * D * F / (N * W))
        limit = parallelism.data_limit(SYMBOLIC)
        assert same(limit, 1 + B * W / C)
        if not sent:
            return
    [found] = sympy.solve(sympy.Eq(cost.data_s + cost.tensor_s, cost.compute_s), N)
    assert same(found, limit)


def layer(a, b):
    """Return a layer with these slopes: tokens a and a d_ff of b at C = W."""
    found = Layer(*map(Fraction, (a, 7, Fraction(2 * b) / 3, 5, 5)))
    assert parallelism.data_slope(found) * 2 == 2 * a
    assert parallelism.tensor_slope(found) == Fraction(b)
    return found


SLOPES = [(30, 7), (40, Fraction(1, 2)), (Fraction(1, 3), 25)]


@pytest.mark.parametrize("a, b", SLOPES)
@pytest.mark.parametrize("shared", [True, False])
def test_no_split_of_a_fine_grid_beats_the_formula(a, b, shared):
    one = layer(a, b)
    limit = parallelism.shared_mesh_limit(one) if shared else parallelism.mesh_limit(one)
    best = Fraction(0)
    for i in range(41):
        for j in range(41):
            # A mesh is bound where what it sends takes as long as it computes: each axis alone,
            # or both together where they share the links.
            data_share, tensor_share = Fraction(i, 40), Fraction(j, 40)
            devices = (1 + a * data_share) * (1 + b * tensor_share)
            share = data_share + tensor_share if shared else max(data_share, tensor_share)
            if share <= 1:
                best = max(best, devices)
    assert best <= limit and best > 0.97 * limit


@pytest.mark.parametrize("a, b", SLOPES)
def test_the_split_of_shared_links_lies_on_the_edge_and_has_whole_axes(a, b):
    one = layer(a, b)
    split = parallelism.shared_mesh_split(one)
    assert min(split) >= 1 and split[0] * split[1] == parallelism.shared_mesh_limit(one)
    cost = parallelism.fully_sharded_tensor_parallel(one, *split)["forward"]
    assert cost.data_s + cost.tensor_s == cost.compute_s


@pytest.mark.parametrize("a, b", SLOPES)
@pytest.mark.parametrize("shared", [True, False])
def test_no_mesh_of_whole_devices_is_larger_and_compute_bound(a, b, shared):
    one = layer(a, b)

    def fits(*mesh):
        cost = parallelism.fully_sharded_tensor_parallel(one, *mesh)["forward"]
        seconds = cost.data_s, cost.tensor_s
        return (sum(seconds) if shared else max(seconds)) <= cost.compute_s

    sizes = [f * t for f in range(1, 45) for t in range(1, 45) if fits(f, t)]
    found = parallelism.largest_mesh(one, shared)
    assert fits(*found) and math.prod(found) == max(sizes)


def test_a_mesh_of_nodes_has_links_of_its_own_for_each_axis():
    example, network = parallelism.EXAMPLE, parallelism.EXAMPLE.bandwidth / 9

    def hides(n_fsdp, n_tp):
        mesh = parallelism.fully_sharded_tensor_parallel
        within = mesh(example, n_fsdp, n_tp)["forward"]
        between = mesh(replace(example, bandwidth=network), n_fsdp, n_tp)["forward"]
        return max(between.data_s, within.tensor_s) <= within.compute_s

    nodes, n_tp = parallelism.largest_mesh_of_nodes(example, network)
    assert n_tp == 8 and hides(nodes, 8) and not hides(nodes + 1, 8) and not hides(nodes, 9)
    assert parallelism.largest_mesh_of_nodes(example, network, node=2) == (nodes, 2)
    # FSDP alone, gathering between nodes and then within them, reaches as many nodes
    for n, is_hidden in ((nodes, True), (nodes + 1, False)):
        compute_s = parallelism.fully_sharded(example, 8 * n)["forward"].compute_s
        between_s = all_gather_s(example.weight_bytes / 8, n, network)
        within_s = all_gather_s(example.weight_bytes, 8, example.bandwidth)
        assert (max(between_s, within_s) <= compute_s) == is_hidden
    # narrow layers fill no node
    narrow = replace(example, d_ff=example.d_ff // 2)
    assert parallelism.largest_mesh_of_nodes(narrow, network) == (nodes, 4)


@pytest.mark.parametrize("over_nvlink", [2, 9, 90])
def test_fsdp_over_nodes_sends_an_eighth_of_its_ring_by_each_card(over_nvlink):
    example = parallelism.EXAMPLE
    network = example.bandwidth / over_nvlink
    limit = math.floor(parallelism.fsdp_limit_over_nodes(example, network))
    for n, is_hidden in ((limit, True), (limit + 1, False)):
        cost = parallelism.fully_sharded(example, n)["forward"]
        sent = cost.data_s * example.bandwidth  # by each device to the next of its ring
        seconds = max(sent / example.bandwidth, sent / 8 / network)
        assert (seconds <= cost.compute_s) == is_hidden


@pytest.mark.parametrize("over_nvlink", [2, 9, 90])
def test_fsdp_in_two_stages_sends_a_shard_over_the_network_and_the_rest_within(over_nvlink):
    example = parallelism.EXAMPLE
    network = example.bandwidth / over_nvlink
    limit = parallelism.fsdp_nodes_in_two_stages(example, network)
    for nodes, is_hidden in ((limit, True), (limit + 1, False)):
        compute = parallelism.fully_sharded(example, 8 * nodes)["forward"].compute_s
        from_nodes = example.weight_bytes / 8 * (nodes - 1) / nodes / network
        from_its_own = example.weight_bytes * 7 / 8 / example.bandwidth
        assert (max(from_nodes, from_its_own) <= compute) == is_hidden


def test_operations_are_those_of_a_real_ffn_and_its_gradients():
    n, tokens, d, f = 2, 12, 8, 20
    x = torch.randn(tokens // n, d, requires_grad=True)
    w1, w2 = torch.randn(2, d, f, requires_grad=True).unbind()
    w3 = torch.randn(f, d, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = (torch.nn.functional.silu(x @ w1) * (x @ w2)) @ w3
    with FlopCounterMode(display=False) as backward:
        y.backward(torch.randn_like(y))
    cost = parallelism.data_parallel(Layer(tokens, d, f, 1.0, 1.0), n)
    assert forward.get_total_flops() == cost["forward"].flops
    assert backward.get_total_flops() == cost["backward"].flops
    # What is communicated: the gradients, in two bytes.
    assert 2 * (2 * w1.numel() + w3.numel()) == Layer(tokens, d, f, 1.0, 1.0).weight_bytes
