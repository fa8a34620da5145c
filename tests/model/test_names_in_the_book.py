"""The page of functions lists every name that a model takes."""

import re

import pytest

from a2lib.model import ATTENTIONS, SIZES
from a2lib.model.checkpointing import strategy
from a2lib.paths import ROOT

TABLE = re.compile(r"^\| argument \| its names \|\n.*?\n\n", re.M | re.S)
[table] = TABLE.findall((ROOT / "book" / "api.md").read_text(encoding="utf-8"))
LINES = table.split("\n")[2:5]
ATTENTION, CHECKPOINTING, SIZE = (set(re.findall(r"`([^`]+)`", line)) for line in LINES)


def test_attentions_and_sizes():
    assert {*ATTENTIONS, "attention", "ATTENTIONS"} == ATTENTION
    assert {*SIZES, "from_size", "SIZES", "TINY", "a2lib.shapes"} == SIZE


@pytest.mark.parametrize("name", sorted(CHECKPOINTING - {"checkpointing"}))
def test_checkpointing(name):
    assert strategy(name.replace(":k", ":2"), 4)


def test_no_strategy_is_left_out():
    with pytest.raises(ValueError, match="allowed are") as refusal:
        strategy("another", 4)
    allowed = str(refusal.value).partition("allowed are ")[2].split(", ")
    listed = {name.partition(":")[0] for name in CHECKPOINTING - {"checkpointing"}}
    assert {name.partition(":")[0] for name in allowed} == listed
