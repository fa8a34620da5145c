"""Head and loss in one against the logits in full: losses, and gradients by name."""

import pytest
import torch
from refusals import refused

from a2lib.model import head, linear_cross_entropy, linear_cross_entropy_plain
from a2lib.model.head import loss_and_gradient

V, D = 37, 12


def inputs(dtype=torch.float64, shape=(2, 11), frozen=(), device="cpu", sizes=(V, D)):
    """x and weight by name, those not frozen requiring gradients, and targets."""
    vocabulary, width = sizes
    made = {
        "x": torch.randn(*shape, width).to(device, dtype),
        "weight": torch.randn(vocabulary, width).to(device, dtype),
    }
    for name, tensor in made.items():
        tensor.requires_grad_(name not in frozen)
    return made, torch.randint(vocabulary, shape).to(device)


def found(function, made, targets, scale=1.0, **options):
    x = made["x"].detach().requires_grad_(made["x"].requires_grad)
    weight = made["weight"].detach().requires_grad_(made["weight"].requires_grad)
    loss = function(x, weight, targets, **options)
    (scale * loss).backward()
    return {"loss": loss.detach(), "dx": x.grad, "dweight": weight.grad}


def compare(ours, plain, allowed):
    assert ours.keys() == plain.keys()
    for name, right in plain.items():
        if right is None:
            assert ours[name] is None, name
            continue
        assert ours[name].dtype == right.dtype or name == "loss", name
        off = (ours[name].double() - right.double()).norm() / right.double().norm()
        assert off <= allowed, (name, off.item())


@pytest.mark.parametrize("chunk", [1, 5, 4096])
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)])
def test_it_is_the_plain_one(chunk, frozen):
    made, targets = inputs(frozen=frozen)
    plain = found(linear_cross_entropy_plain, made, targets, 3.0)
    compare(found(linear_cross_entropy, made, targets, 3.0, chunk=chunk), plain, 1e-14)


@pytest.mark.parametrize("left_out", ["some", "a chunk", "all"])
@pytest.mark.parametrize("chunk", [6, 4096])
def test_tokens_that_are_left_out_are_those_of_the_plain_one(monkeypatch, chunk, left_out):
    made, targets = inputs(shape=(24,))
    places = {"some": slice(0, None, 3), "a chunk": slice(6, 12), "all": slice(None)}
    targets[places[left_out]] = -100
    plain = found(linear_cross_entropy_plain, made, targets)
    ours = found(linear_cross_entropy, made, targets, chunk=chunk)
    monkeypatch.setattr(head, "loss_and_gradient", None)  # no work for what nobody wants
    with torch.no_grad():
        ours["alone"] = linear_cross_entropy(made["x"], made["weight"], targets, chunk)
    plain["alone"] = plain["loss"]
    assert plain["loss"].isnan().item() is (left_out == "all")
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, msg=name, equal_nan=True)


@pytest.mark.parametrize("target", [V, -1])
@pytest.mark.parametrize("loss_of", [linear_cross_entropy, linear_cross_entropy_plain])
def test_a_target_outside_of_the_vocabulary_is_one_line(loss_of, target):
    made, targets = inputs()
    targets[0, 3] = target
    words = f"target {target}: allowed are 0 to {V - 1}, and -100"
    refused(words, loss_of, *made.values(), targets, error=IndexError)
    with torch.no_grad():
        refused(words, loss_of, *made.values(), targets, error=IndexError)


def test_a_target_outside_of_the_vocabulary_makes_its_row_of_the_gradient_nan():
    """On a GPU, where nobody looks first, this is what runs."""
    targets = torch.tensor([0, V - 1, -100, V, -1, -101])
    loss, dlogits = loss_and_gradient(torch.randn(6, V), targets)
    assert loss.isnan() and dlogits[:3].isfinite().all() and dlogits[3:].isnan().all()


@pytest.mark.gpu
def test_on_a_gpu_a_target_outside_of_the_vocabulary_makes_the_loss_nan():
    made, targets = inputs(torch.bfloat16, (300,), device="cuda", sizes=(128, 64))
    for target in (128, -1, -101):
        targets[7] = target
        wrong = found(linear_cross_entropy, made, targets, chunk=64)
        assert wrong["loss"].isnan() and wrong["dweight"].isnan().all()
        assert linear_cross_entropy_plain(*made.values(), targets).isnan()
    targets[7] = -100
    assert linear_cross_entropy(*made.values(), targets, 64).isfinite()
    assert linear_cross_entropy_plain(*made.values(), targets).isfinite()


def check_against_float64(made, targets, chunk, beside):
    """As near to it as the plain one, but for a quarter and ``beside``."""
    wide = {}
    for name, tensor in made.items():
        wide[name] = tensor.detach().double().requires_grad_()
    exact = found(linear_cross_entropy_plain, wide, targets)
    ours = found(linear_cross_entropy, made, targets, chunk=chunk)
    plain = found(linear_cross_entropy_plain, made, targets)
    for name, right in exact.items():
        off = (ours[name].double() - right).norm() / right.norm()
        allowed = (plain[name].double() - right).norm() / right.norm()
        assert off <= 1.25 * allowed + beside, (name, off.item(), allowed.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_to_float64_as_the_plain_one(dtype):
    check_against_float64(*inputs(dtype, shape=(300,)), chunk=32, beside=1e-7)


def test_it_is_one_call_of_a_compiled_graph():
    made, targets = inputs(torch.float32)
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": True}
    compiled = torch.compile(lambda *given: linear_cross_entropy(*given, chunk=7) * 2, **options)
    plain = found(lambda *given: linear_cross_entropy_plain(*given) * 2, made, targets)
    compare(found(compiled, made, targets), plain, 1e-6)


def test_the_operator_is_what_it_says():
    made, targets = inputs(shape=(11,))
    operator = torch.ops.a2lib.linear_cross_entropy.default
    torch.library.opcheck(operator, (made["x"], made["weight"], targets, 5, True))


def test_no_logits_of_all_tokens(monkeypatch):
    """The largest product has the rows of one chunk."""
    seen = []

    def watched(logits, targets):
        seen.append(logits.shape)
        return loss_and_gradient(logits, targets)

    monkeypatch.setattr(head, "loss_and_gradient", watched)
    made, targets = inputs()
    found(linear_cross_entropy, made, targets, chunk=8)
    assert seen == [(8, V), (8, V), (6, V)]


def test_a_model_gives_its_loss(make_model, batch, loss_and_gradients):
    model = make_model(dtype=torch.float64)
    plain_loss, plain = loss_and_gradients(model, batch)
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    assert abs(loss.item() - plain_loss.item()) < 1e-13
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_does_to_it_what_it_does_to_the_plain_one(dtype):
    made, targets = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        plain = found(linear_cross_entropy_plain, made, targets)
        compare(found(linear_cross_entropy, made, targets, chunk=5), plain, 0.01)


def test_a_second_derivative_is_refused():
    made, targets = inputs()
    square = linear_cross_entropy(*made.values(), targets).square()
    refused("no second derivative", square.backward, create_graph=True, error=RuntimeError)


def test_what_does_not_fit_is_one_line():
    made, targets = inputs()
    x, weight = made["x"], made["weight"]
    for wrong in (
        (x, weight[:, 1:], targets, 4),
        (x, weight, targets[:, 1:], 4),
        (x, weight.float(), targets, 4),
        (x, weight, targets, 0),
    ):
        refused("chunk positive; got", linear_cross_entropy, *wrong)


@pytest.mark.gpu
def test_on_a_gpu_the_sum_over_chunks_is_not_rounded():
    """Compiled softmax, and a product of 16 bits that is added to float32."""
    given = inputs(torch.bfloat16, (3000,), device="cuda", sizes=(1536, 256))
    check_against_float64(*given, chunk=512, beside=1e-6)
