"""What a notebook cannot measure is refused in one line, before anything is measured."""

import pytest
from notebook_cells import load_cells
from refusals import refused

from a2lib.lab import ParameterError

# Notebooks that look at a parameter in a function of theirs.
LOOKS = {"attention": "pass_keys", "collectives": "keys_by_group"}


@pytest.mark.parametrize(("notebook", "wrong", "words"), [
    ("attention", {"implementations": "eager,flash"}, "eager, by_hand"),
    ("attention", {"sweep": "some"}, "shape, grid"),
    ("benchmark", {"capture": True}, "need a GPU"),
    ("checkpointing", {"strategies": "segment:5"}, "allowed are none, half"),
    ("collectives", {"operations": "all_reduce,all_to_all"}, "all_reduce, "),
    ("collectives", {"backend": "nccl"}, "GPU"),
    ("compile", {"written": "sparse"}, "plain, causal, heads"),
    ("compile", {"seq_len": 0}, "whole numbers from 1"),
    ("ddp", {"carrier": "copy_engines"}, "bucketed and updating alone"),
    ("ddp", {"wrappers": "naive", "sent_dtype": "bf16"}, "naive"),
    ("flash", {"implementations": "a2lib,cudnn"}, "allowed: auto, all, a2lib, eager"),
    ("flash", {"sweep": "handout", "seq_len": 64}, "sweep = handout has its own lengths"),
    ("fsdp", {"wrappers": "fsdp3"}, "did you mean fsdp"),
    ("fsdp", {"world_size": 1}, "from 2"),
    ("leaderboard", {"ways": "fast"}, "recomputed, "),
    ("leaderboard", {"part": "losses"}, "did you mean loss"),
    ("leaderboard", {"room_percent": 101}, "to 100"),
    ("memory", {"model": "smal"}, "did you mean small"),
    ("parallelism", {"schemes": "fsdp_tp"}, "fsdp_tp"),
    ("parallelism", {"tokens": 3}, "tokens"),
    ("sharded_optimizer", {"capture": True}, "GPU"),
    ("sharded_optimizer", {"world_size": 1}, "from 2"),
])  # fmt: skip
def test_a_wrong_parameter_is_one_line(gpus, monkeypatch, notebook, wrong, words):
    gpus(0)
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cpu")

    def ask():
        cells = load_cells(notebook, **wrong)
        if notebook in LOOKS:
            getattr(cells, LOOKS[notebook])()

    refused(words, ask, error=ParameterError)
