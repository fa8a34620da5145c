"""The feed-forward stack under every scheme and mesh against one process: y, dx and each gradient
by name, of layers with random weights and a random dy."""

import torch
from checking import check, world

from a2lib.parallel.feed_forward import (
    FeedForwardStack,
    mesh_of,
    own_tokens,
    relative_errors,
)

LAYERS, D_MODEL, D_FF, TOKENS = 3, 16, 24, 32


def random_layers():
    return [
        {
            "w1": torch.randn(D_MODEL, D_FF) / D_MODEL**0.5,
            "w2": torch.randn(D_MODEL, D_FF) / D_MODEL**0.5,
            "w3": torch.randn(D_FF, D_MODEL) / D_FF**0.5,
        }
        for _ in range(LAYERS)
    ]


@check(2, 4)
def each_scheme_is_the_one_process():
    _, size = world()
    device = torch.get_default_device().type
    layers = random_layers()
    x, dy = torch.randn(2, TOKENS, D_MODEL)
    for tensor in (n for n in (1, 2, 4) if n <= size):
        for sharded in (False, True):
            mesh = mesh_of(device, size // tensor, tensor)
            stack = FeedForwardStack(mesh, layers, sharded)
            errors = relative_errors(mesh, stack, layers, x, dy)
            assert len(errors) == 2 + 3 * LAYERS, errors
            assert max(errors.values()) < 2e-5, (size, tensor, sharded, errors)


@check(2)
def messages_are_sent_again_and_left_out():
    _, size = world()
    mesh = mesh_of(torch.get_default_device().type, 1, size)
    stack = FeedForwardStack(mesh, random_layers(), sharded=False)
    x = own_tokens(mesh, torch.randn(TOKENS, D_MODEL))
    summed = stack.forward(x)
    messages = stack.wire.messages(lambda: stack.forward(x))
    # A sum for each layer and each part of the batch.
    assert list(messages) == ["tensor"] and len(messages["tensor"]) == 2 * LAYERS
    stack.wire.send(messages["tensor"])
    alone = []
    stack.wire.without(lambda: alone.append(stack.forward(x)))
    assert not torch.allclose(alone[0], summed)
    assert torch.equal(stack.forward(x), summed)
