"""The feed-forward stack of notebooks/parallelism.ipynb under every scheme and mesh against one
process: y, dx and each gradient by name, of layers with random weights and a random dy."""

import torch
from checking import check, world
from notebook_cells import load_cells

LAYERS, D_MODEL, D_FF, TOKENS = 3, 16, 24, 32


def random_layers():
    layers = []
    for _ in range(LAYERS):
        layers.append(
            {
                "w1": torch.randn(D_MODEL, D_FF) / D_MODEL**0.5,
                "w2": torch.randn(D_MODEL, D_FF) / D_MODEL**0.5,
                "w3": torch.randn(D_FF, D_MODEL) / D_FF**0.5,
            }
        )
    return layers


@check(2, 4)
def each_scheme_is_the_one_process():
    _, size = world()
    device = torch.get_default_device().type
    cells = load_cells("parallelism")
    layers = random_layers()
    x, dy = torch.randn(2, TOKENS, D_MODEL)
    for tensor in (1, 2, 4)[: size.bit_length()]:  # of 2 ranks 1 and 2
        for sharded in (False, True):
            mesh = cells.mesh_of(device, size // tensor, tensor)
            stack = cells.FeedForwardStack(mesh, layers, sharded)
            errors = cells.relative_errors(mesh, stack, layers, x, dy)
            assert len(errors) == 2 + 3 * LAYERS, errors
            assert max(errors.values()) < 2e-5, (size, tensor, sharded, errors)


@check(2)
def messages_are_sent_again_and_left_out():
    _, size = world()
    cells = load_cells("parallelism")
    mesh = cells.mesh_of(torch.get_default_device().type, 1, size)
    stack = cells.FeedForwardStack(mesh, random_layers(), sharded=False)
    x = cells.own_tokens(mesh, torch.randn(TOKENS, D_MODEL))
    summed = stack.forward(x)
    messages = stack.wire.messages(lambda: stack.forward(x))
    # A sum for each layer and each part of the batch.
    assert list(messages) == ["tensor"] and len(messages["tensor"]) == 2 * LAYERS
    stack.wire.send(messages["tensor"])
    alone = []
    stack.wire.without(lambda: alone.append(stack.forward(x)))
    assert not torch.allclose(alone[0], summed)
    assert torch.equal(stack.forward(x), summed)
