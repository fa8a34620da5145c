"""What a configuration may be, and that the command has the same options and rules."""

import dataclasses

import pytest
from programs import printed
from refusals import refused, refused_command

from a2lib.benchmark import Config, check_here
from a2lib.benchmark.__main__ import main, parse, parser
from a2lib.model import SIZES

# Option, value, and what the one line must say.
WRONG = [
    ("size", "huge", "size 'huge': allowed are small, medium, large, xl25, 2.7B, 8B, 10B"),
    ("size", "xl", "'xl' is xl25 in the 2025 handout, 2.7B in that of 2026"),
    ("d_model", 9, "num_heads 2 does not divide d_model 9"),
    ("num_heads", 8, "RoPE turns pairs, so head_dim must be even"),
    ("batch", 0, "allowed are whole numbers from 1 to 65536"),
    ("mode", "train", "allowed are inference, forward, forward-backward, train-step"),
    ("attention", "fast", "attention 'fast': allowed are eager, flash, sdpa_flash"),
    ("checkpointing", "segments:3", "allowed as k are 1 to 2"),
    ("torch_profile", "no/such/folder/x", "torch_profile 'no/such/folder/x': no such folder"),
    ("memory_history", ".", "memory_history '.' is a folder; allowed is a file"),
    ("precision", "tf32", "needs a CUDA device; allowed on cpu is fp32, bf16, bf16_weights"),
    ("nvtx", "phases", "nvtx 'phases' needs a CUDA device; allowed on cpu is none"),
]


@pytest.mark.parametrize("name, value, complaint", WRONG)
def test_wrong_values_in_one_line(tiny, tiny_arguments, capsys, name, value, complaint):
    refused(complaint, lambda: check_here(tiny(**{name: value})))
    said = refused_command(main, tiny_arguments(f"--{name.replace('_', '-')}={value}"), capsys)
    assert complaint in said


NO_OPTION = {
    "--batch": "expected one argument",
    "--contxt=8": "unknown --contxt=8 (did you mean --context?); allowed are --help, --si",
    "--cuda-profiler": "cuda_profiler needs a CUDA device",
}


@pytest.mark.parametrize("given", NO_OPTION)
def test_what_is_no_option(tiny_arguments, capsys, given):
    assert NO_OPTION[given] in refused_command(parse, tiny_arguments(given), capsys)


CAPTURED = {"capture": True, "warmup": 2}
LOST = "nvtx 'modules'.*allowed.*'phases'"
EXCLUSIVE = [
    (CAPTURED, {"warmup": 1}, "warmup is 1; allowed with capture are whole numbers of at least 2"),
    (CAPTURED, {"nvtx": "modules"}, "nvtx 'modules' is lost in a replay; allowed is 'phases'"),
    (CAPTURED, {"keep_gradients": True}, "allowed with capture is to leave it out"),
    ({"torch_profile": "x"}, {"cuda_profiler": True}, "cuda_profiler and torch_profile exclude"),
    ({"compile_blocks": True}, {"compile": True}, "compile and compile_blocks exclude each other"),
    ({"compile": True, "nvtx": "phases"}, {"nvtx": "modules"}, LOST),
    ({"compile_blocks": True, "nvtx": "phases"}, {"nvtx": "modules"}, LOST),
    ({"checkpointing": "block", "nvtx": "phases"}, {"nvtx": "modules"}, LOST),
]


@pytest.mark.parametrize("good, more, complaint", EXCLUSIVE)
def test_what_excludes_each_other(tiny, good, more, complaint):
    tiny(**{"device": "cuda", **good})
    refused(complaint, tiny, **{"device": "cuda", **good, **more})


def test_a_device_that_is_not_there(tiny, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused("there is no CUDA device here; allowed is cpu", check_here, tiny(device="cuda"))
    captured = tiny(capture=True, warmup=2, device=None)
    refused("capture needs a CUDA device; allowed on cpu", check_here, captured)
    assert check_here(tiny(device=None)) == "cpu"


def test_sizes_and_what_replaces_them(tiny):
    config = Config(size="medium", context=128)
    assert config.shape == SIZES["medium"]
    assert config.resolved()["size"] == "medium"
    changed = Config(size="medium", num_layers=2)
    assert changed.shape == dataclasses.replace(SIZES["medium"], num_layers=2)
    resolved = changed.resolved()
    assert (resolved["size"], resolved["num_layers"], resolved["d_ff"]) == (None, 2, 4096)
    small = dataclasses.asdict(SIZES["small"])
    assert Config(size="large", **small).resolved()["size"] == "small"


def test_every_field_is_an_option(tiny, tiny_arguments):
    given = {"size": "large", "mode": "forward", "precision": "bf16", "seed": 3}
    given |= {"attention": "sdpa_math", "checkpointing": "segments:2"}
    want = tiny(**given, compile=True, autocast_cache=False)
    fields = {field.name for field in dataclasses.fields(Config)}
    shown = {"--" + name.replace("_", "-") for name in fields - {"autocast_cache"}}
    options = {o for action in parser()._actions for o in action.option_strings}
    assert options == shown | {"--no-autocast-cache", "--json", "--help", "-h"}
    flags = ["--compile", "--no-autocast-cache", "--json"]
    named = [f"--{name}={value}" for name, value in given.items()]
    assert parse(tiny_arguments(*named, *flags)) == (want, True)
    assert parse(tiny_arguments()) == (tiny(), False)


def test_help_needs_no_torch(python):
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['--help'];"
    code += "runpy.run_module('a2lib.benchmark', run_name='__main__', alter_sys=True)"
    out = printed(python(code))
    assert "--checkpointing" in out and "examples" in out
