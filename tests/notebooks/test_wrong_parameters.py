"""What a notebook cannot measure is refused in one line, before anything is measured."""

import pytest
from notebook_cells import load_cells
from refusals import refused

from a2lib.lab import ParameterError

# Notebooks that look at a parameter in a function of theirs.
LOOKS = {"attention": "pass_keys", "collectives": "keys_by_group"}


@pytest.mark.parametrize(("notebook", "wrong", "words"), [
    ("attention", {"implementations": "eager,flash"}, "eager, by_hand"),
    ("attention", {"seq_len": 0}, "a whole number from 1"),
    ("attention", {"sweep": "some"}, "shape, grid"),
    ("benchmark", {"mode": "x"}, "mode = 'x': allowed: all, inference"),
    ("benchmark", {"capture": True}, "need a GPU"),
    ("benchmark", {"sweep": "tables"}, "sweep = 'tables': "),
    ("checkpointing", {"strategies": "segment:5"}, "allowed are none, half"),
    ("checkpointing", {"strategies": "segments:8"}, "allowed as k are 1 to 4"),
    ("checkpointing", {"precision": "tf32"}, "needs a GPU"),
    ("checkpointing", {"sweep": "segment"}, "did you mean segments"),
    ("collectives", {"operations": "all_reduce,all_to_all"}, "all_reduce, "),
    ("collectives", {"world_size": 1}, "from 2"),
    ("collectives", {"backend": "nccl"}, "GPU"),
    ("compile", {"written": "sparse"}, "plain, causal, heads"),
    ("compile", {"seq_len": 0}, "whole numbers from 1"),
    ("compile", {"sweep": "model"}, "did you mean models"),
    ("ddp", {"sweep": "all"}, "GPU"),
    ("ddp", {"capture": True}, "GPU"),
    ("ddp", {"carrier": "copy_engines"}, "bucketed and updating alone"),
    ("ddp", {"wrappers": "naive", "sent_dtype": "bf16"}, "naive"),
    ("ddp", {"world_size": 1}, "from 2"),
    ("flash", {"sweep": "hand"}, "did you mean handout"),
    ("flash", {"implementations": "a2lib,cudnn"}, "allowed: auto, all, a2lib, eager"),
    ("flash", {"seq_len": 0}, "a whole number from 1"),
    ("flash", {"sweep": "handout", "seq_len": 64}, "sweep = handout has its own lengths"),
    ("fsdp", {"sweep": "all"}, "GPU"),
    ("fsdp", {"capture": True}, "GPU"),
    ("fsdp", {"wrappers": "fsdp3"}, "did you mean fsdp"),
    ("fsdp", {"world_size": 1}, "from 2"),
    ("leaderboard", {"ways": "fast"}, "recomputed, "),
    ("leaderboard", {"part": "losses"}, "did you mean loss"),
    ("leaderboard", {"model": "7B"}, "tiny, small"),
    ("leaderboard", {"room_percent": 101}, "to 100"),
    ("leaderboard", {"backend": "nccl"}, "GPU"),
    ("memory", {"model": "smal"}, "did you mean small"),
    ("memory", {"context": 0}, "from 1"),
    ("memory", {"sweep": "tables"}, "table, sizes"),
    ("parallelism", {"schemes": "fsdp_tp"}, "fsdp_tp"),
    ("parallelism", {"tokens": 3}, "tokens"),
    ("parallelism", {"d_ff": 33, "schemes": "tp"}, "d_ff"),
    ("parallelism", {"world_size": 1}, "from 2"),
    ("sharded_optimizer", {"sweep": "all"}, "GPU"),
    ("sharded_optimizer", {"capture": True}, "GPU"),
    ("sharded_optimizer", {"wrappers": "bucket"}, "did you mean bucketed"),
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
