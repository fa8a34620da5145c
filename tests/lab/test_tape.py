"""The tape: sizes a person can add up, and peaks that a GPU's allocator measured."""

import committed
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from a2lib.lab.tape import Tape, with_fake_weights
from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import SIZES
from a2lib.theory.memory.step import WORKSPACE

pytestmark = pytest.mark.usefixtures("plain_frames")  # it counts a step's tensors

KIB = 1024


def test_storages_by_hand():
    x = torch.ones(256, 4)  # 4 KiB
    with Tape() as tape:
        tape.hold("x", [x, x[0], None])
        assert (tape.now, tape.peak) == (4 * KIB, 4 * KIB)
        y = x * 2
        view = y.view(-1)[:10]
        assert tape.now == 8 * KIB
        del y
        assert tape.now == 8 * KIB  # the view holds it
        a, b = torch.cat([x, x]), torch.stack([x])
        del view, a
        assert (tape.now, tape.peak) == (8 * KIB, 20 * KIB)
        tape.hold("stacked", [b])
    assert tape.at_peak() == {
        "aten.cat.default": 8 * KIB,
        "x": 4 * KIB,
        "aten.mul.Tensor": 4 * KIB,
        "stacked": 4 * KIB,
    }
    assert sum(tape.at_peak().values()) == tape.peak


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
            tape.hold("weights", model.parameters())
            tape.hold("input", [x])
            for state in optimizer.state.values():
                tape.hold("moments", state.values())
            step()
    weights, moments, rows = 8 * KIB, 16 * KIB + 2 * 4, 16 * KIB
    standing = weights + moments + rows
    # Backward multiplies with the ones that the sum hands on, expanded and so of one number; both
    # gradients are there with the hidden, and the gradient of the hidden.
    assert tape.now == standing
    assert tape.at_peak()["weights"] == weights and tape.at_peak()["moments"] == moments
    assert tape.peak - standing == pytest.approx(2 * rows + 4 * KIB, abs=16)


def test_what_is_made_inside_of_the_softmax_gradient():
    x, gradient = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)
    for as_cuda, tensors in ((False, 4), (True, 5)):  # x and its gradient, the result and its own
        with Tape(as_cuda=as_cuda) as tape:
            torch.softmax(x, -1).backward(gradient)
        assert tape.peak == tensors * 16 * KIB
        x.grad = None


MEASURED = [("small", 128, "inference"), ("small", 128, "train-step"), ("2.7B", 2048, "inference")]


@pytest.mark.parametrize(("size", "context", "mode"), MEASURED)
def test_fake_tensors_have_the_peak_that_a_gpu_measured(size, context, mode):
    with FakeTensorMode():
        model = TransformerLM.from_size(SIZES[size], context, attention="eager", device="meta")
        with_fake_weights(model, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(4, context, dtype=torch.long)
        targets = torch.zeros(4, context, dtype=torch.long)

        def step():
            with torch.set_grad_enabled(mode == "train-step"):
                output = model(tokens)
                if mode == "inference":
                    return
                output = cross_entropy(output, targets)
                output.backward()
            optimizer.step()
            optimizer.zero_grad()

        if mode == "train-step":
            step()
        with Tape(as_cuda=True) as tape:
            tape.hold("weights", [*model.parameters(), *model.buffers()])
            tape.hold("batch", [tokens, targets])
            for state in optimizer.state.values():
                tape.hold("moments", state.values())
            step()
    (row,) = (
        row
        for row in committed.measured("memory")
        if (row["model"], row["context"], row["mode"]) == (size, str(context), mode)
        and (row["precision"], row["attention"]) == ("fp32", "eager")
        and (row["step_number"], row["phase"]) == ("1", "step")
    )
    workspaces = WORKSPACE if mode == "inference" else 2 * WORKSPACE
    assert tape.peak + workspaces == pytest.approx(int(row["tensor_bytes"]), rel=1e-3)
