"""An attention is the one it is named after, or an error."""

import copy
import pickle

import pytest
import torch
from refusals import refused
from torch.profiler import ProfilerActivity, profile

from a2lib.attention import UnsupportedError
from a2lib.model import ATTENTIONS, causal_attention

# The operator that only this implementation calls, as the profiler names it on a CPU.
OPERATOR = {
    "sdpa_flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "sdpa_math": "aten::_scaled_dot_product_attention_math",
}


@pytest.mark.parametrize("name", OPERATOR)
def test_the_forced_backend_is_what_runs(make_model, batch, name):
    model = make_model(attention=name)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(batch[0])
    calls = {}
    for event in seen.key_averages():
        calls[event.key] = event.count
    [other] = OPERATOR.keys() - {name}
    assert calls.get(OPERATOR[name]) == len(model.layers) and OPERATOR[other] not in calls


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_cannot_run_raises(make_model, batch, name):
    model = make_model(attention=name, device="cpu")
    with pytest.raises(RuntimeError, match="No (viable|available)"):
        model(batch[0])


def test_what_is_ours_refuses_in_its_own_words(make_model, batch):
    flex = make_model(attention="flex", device="cpu")
    flash = make_model(attention="flash", dtype=torch.float64)
    refused("flex needs a CUDA GPU", flex, batch[0], error=UnsupportedError)
    refused("bfloat16, float16, float32", flash, batch[0], error=UnsupportedError)


def test_unknown_names(make_model):
    for name in ("", "Flash", "sdpa", None):
        refused(f"allowed are {', '.join(ATTENTIONS)}", causal_attention, name)
        refused("allowed are eager, flash, sdpa_flash", make_model, attention=name)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_model_is_copied_and_saved_as_a_whole(make_model, name):
    model = make_model(attention=name)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kept = other.layers[0].attn.attention
        assert repr(kept) == repr(model.layers[0].attn.attention)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"])
def test_on_a_gpu_each_agrees_with_eager_under_autocast(make_model, name):
    sizes = {"d_model": 128, "d_ff": 256, "context_length": 256, "device": "cuda"}
    tokens = torch.randint(19, (2, 256), device="cuda")
    found = {}
    for attention in ("eager", name):
        model = make_model(attention=attention, **sizes)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        logits.square().mean().backward()
        found[attention] = {"logits": logits}
        for parameter, p in model.named_parameters():
            found[attention][parameter] = p.grad
    for tensor, want in found["eager"].items():
        error = (found[name][tensor].double() - want.double()).norm() / want.double().norm()
        assert error < 0.05, tensor
