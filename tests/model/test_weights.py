"""Names, shapes, placement and initialisation of the weights."""

import copy

import pytest
import torch

from a2lib.model import Embedding, Linear, RotaryPositionalEmbedding

V, D, F = 19, 24, 40
BLOCK = {
    "ln1": (D,), "attn.q_proj": (D, D), "attn.k_proj": (D, D), "attn.v_proj": (D, D),
    "attn.output_proj": (D, D), "ln2": (D,), "ffn.w1": (F, D), "ffn.w2": (D, F), "ffn.w3": (F, D),
}  # fmt: skip


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


def test_names_and_shapes_of_the_state_dict(make_model):
    expected = [("token_embeddings.weight", (V, D))]
    for i in range(3):
        for name, shape in BLOCK.items():
            expected.append((f"layers.{i}.{name}.weight", shape))
    expected += [("ln_final.weight", (D,)), ("lm_head.weight", (V, D))]
    state = make_model().state_dict()
    assert [(name, tuple(weight.shape)) for name, weight in state.items()] == expected
    other = make_model(attention="sdpa_math", checkpointing="block").state_dict()
    assert list(other) == list(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_seed_gives_one_model_in_every_dtype(make_model, dtype):
    model = make_model(dtype=dtype)
    exact = make_model().state_dict()
    for name, weight in model.state_dict().items():
        assert weight.dtype == dtype and torch.equal(weight, exact[name].to(dtype)), name


def test_seeds_differ_and_leave_the_global_generator_alone(make_model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = make_model(seed=0).state_dict(), make_model(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in first.items():
        assert "ln" in name or not torch.equal(weight, second[name]), name
    first, second = make_model(seed=None).state_dict(), make_model(seed=None).state_dict()
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    torch.manual_seed(3)
    assert_same(make_model(seed=None).state_dict(), first)


def test_from_meta_to_a_device(make_model, batch):
    """The angles are no part of the state dict, and to_empty has left no garbage in them."""
    direct = make_model(dtype=torch.float64)
    weights = direct.state_dict()
    for fill in (lambda m: m.reset_parameters(0), lambda m: m.load_state_dict(weights)):
        model = make_model(device="meta", dtype=torch.float64)
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.is_meta
        assert model(batch[0].to("meta")).shape == (2, 11, 19)
        model.to_empty(device="cpu")
        fill(model)
        assert_same(model.state_dict(), weights)
        assert torch.equal(model(batch[0]), direct(batch[0]))


def test_angles_survive_casts():
    rope = RotaryPositionalEmbedding(10_000.0, 8, 4096)
    cos = rope.cos.clone()
    rope.to(torch.bfloat16)
    assert cos.dtype == rope.cos.dtype == torch.float32
    assert torch.equal(rope.float().cos, cos)
    angle = 4095 * 10_000.0 ** (-2 / 8)
    assert rope.double().cos[4095, 1] == torch.tensor(angle, dtype=torch.float64).cos()


def test_blocks_share_one_table(make_model):
    model = copy.deepcopy(make_model())
    cos, sin = model.buffers()
    for block in model.layers:
        assert block.attn.rope.cos is cos and block.attn.rope.sin is sin


def test_truncated_normals():
    linear, embedding = Linear(300, 500), Embedding(400, 300)
    for module, std in ((linear, (2 / 800) ** 0.5), (embedding, 1.0)):
        module.reset_parameters()
        weight = module.weight.detach().double() / std
        assert 2.9 < weight.abs().max() <= 3 + 1e-6
        # A normal distribution cut at 3 has this standard deviation.
        assert weight.std().item() == pytest.approx(0.98658, abs=0.01)
        assert weight.mean().item() == pytest.approx(0, abs=0.02)
