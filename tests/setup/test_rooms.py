"""experiments/harness and the top of report/ serve every section and name none."""

import ast
import importlib
import re

import pytest

from a2lib.measure import Section
from a2lib.measure.sections import SECTIONS
from a2lib.paths import ROOT

PACKAGE = ROOT / "src" / "a2lib"
ROOMS = [*(PACKAGE / "report").glob("*.py"), *(PACKAGE / "experiments" / "harness").glob("*.py")]
ROOMS.remove(PACKAGE / "report" / "readme.py")  # of one section, like a chapter
# Words of a model, of attention, of training and of the ways to spread it. Those that say something
# else as well (compile, memory, model, kernel, head, pass, length) are left out.
WORDS = set(
    "attention causal flash flex sdpa softmax heads headdim seqlen seq qkv logits layer layers"
    " layernorm rmsnorm embedding vocab ffn autocast optimizer adamw forward backward leaderboard"
    " handout eager checkpointing allreduce ddp fsdp sharded sharding microbatch".split()
)
PHRASES = ("head_dim", "end_to_end", "d_model", "all_reduce", "mixed_precision")


def breaches(source):
    """The words of a section among the names and strings of a module, and the sections it names.

    A comment may say what it likes.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        for text in _texts(node):
            plain = re.sub(r"[\W]+", " ", text.lower())
            words = set(re.split(r"[\W_\d]+", plain))
            found += sorted(words & WORDS) + [p for p in PHRASES if p in plain]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("a2lib.measure"):
            there = importlib.import_module(node.module)
            found += [alias.name for alias in node.names
                      if isinstance(getattr(there, alias.name, None), Section)]  # fmt: skip
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("load", "Store"):
            found += [arg.value for arg in node.args
                      if isinstance(arg, ast.Constant) and arg.value in SECTIONS]  # fmt: skip
    return found


def _texts(node):
    """What a node says itself: a name, an argument's name, a string."""
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        if isinstance(text := getattr(node, field, None), str):
            yield text
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


@pytest.mark.parametrize("file", ROOMS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_serves_every_section_names_none(file):
    assert breaches(file.read_text()) == [], f"{file}: say it in a chapter or an experiment instead"


def test_the_rooms_are_there():
    assert {"page.py", "plots.py", "tables.py", "sweep.py", "parameters.py"} <= {
        file.name for file in ROOMS
    }


@pytest.mark.parametrize(
    "source, found",
    [
        ("rows['head_dim']", ["head_dim"]),
        ("def f(seq_len): pass", ["seq"]),
        ("pick(rows, causal=True)", ["causal"]),
        ("rows.backward", ["backward"]),
        ("f'{x} layers'", ["layers"]),
        ("from a2lib.measure import BENCHMARK", ["BENCHMARK"]),
        ("data.load('ceiling')", ["ceiling"]),
        ("compile_ahead(memory, head, along, kernel='forwarded')  # heads", []),
        ("data.load(section); table.head = 'size'", []),
    ],
)
def test_a_word_of_a_section_is_seen(source, found):
    assert sorted(breaches(source)) == sorted(found)
