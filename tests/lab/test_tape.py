"""The tape: sizes a person can add up."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from a2lib.lab.tape import Tape

pytestmark = pytest.mark.usefixtures("plain_frames")  # it counts a step's tensors

KIB = 1024


def test_storages_by_hand():
    x = torch.ones(256, 4)  # 4 KiB
    with Tape() as tape:
        tape.hold([x, x[0]])
        assert (tape.now, tape.peak) == (4 * KIB, 4 * KIB)
        y = x * 2
        view = y.view(-1)[:10]
        assert tape.now == 8 * KIB
        del y
        assert tape.now == 8 * KIB  # the view holds it
        a, b = torch.cat([x, x]), torch.stack([x])
        del view, a
        assert (tape.now, tape.peak) == (8 * KIB, 20 * KIB)
        tape.restart()
        assert b.numel() and tape.peak == 8 * KIB


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_step_of_two_layers_by_hand(fake):
    """Weights 2 x 4 KiB, moments twice that, input and hidden 16 KiB each."""
    with torch.device("cpu"), FakeTensorMode() if fake else torch.enable_grad():
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.zeros(128, 32)

        def step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with Tape() as tape:
            tape.hold([*model.parameters(), x])
            for state in optimizer.state.values():
                tape.hold(state.values())
            step()
    weights, moments, rows = 8 * KIB, 16 * KIB + 2 * 4, 16 * KIB
    standing = weights + moments + rows
    # Backward multiplies with the ones that the sum hands on, expanded and so of one number; both
    # gradients are there with the hidden, and the gradient of the hidden.
    assert tape.now == standing
    assert tape.peak - standing == pytest.approx(2 * rows + 4 * KIB, abs=16)
