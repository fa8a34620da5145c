"""Every ```python block of the book is a script that a reader can start: on the CPU, in seconds.
So is every cell whose code a page shows.

A block whose first line is `# torchrun --standalone --nproc-per-node 2 NAME.py` is started so.
"""

import re
import textwrap

import pytest
from forked import run_script

from a2lib.paths import ROOT

# A fence may stand inside a directive or a list, and be longer than three backticks.
BLOCK = re.compile(r"^(?P<fence>[ ]*`{3,})python[ ]*\n(?P<code>.*?)^(?P=fence)[ ]*$", re.M | re.S)
# Without options: those of all other cells hide the code.
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?![:-])(?P<code>.*?)^```$", re.M | re.S)
TORCHRUN = re.compile(r"# (torchrun --standalone --nproc-per-node 2) (\w+\.py)\n")
SECONDS = 300  # on a busy machine; alone an example takes some five


def find_examples(text):
    """Return the scripts in the text of a page, and the cells that it shows."""
    found = [*BLOCK.finditer(text), *CELL.finditer(text)]
    return [textwrap.dedent(block["code"]) for block in found]


def run_example(code, folder):
    """Run a script in `folder`, in two ranks where its first line says so."""
    started_by = TORCHRUN.match(code)
    script = folder / (started_by[2] if started_by else "example.py")
    script.write_text(code, encoding="utf-8")
    return run_script(script, folder=folder, ranks=2 if started_by else 1, seconds=SECONDS)


EXAMPLES = {}
for page in sorted((ROOT / "book").glob("*.md")):
    for number, code in enumerate(find_examples(page.read_text(encoding="utf-8")), 1):
        EXAMPLES[f"{page.stem}-{number}"] = code


def test_no_block_of_python_is_overlooked():
    for page in (ROOT / "book").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^ *(?:`{3,}|~{3,}) *py", text, re.M)
        assert len(BLOCK.findall(text)) == len(fences), page.name


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(name, tmp_path):
    done = run_example(EXAMPLES[name], tmp_path)
    assert done.returncode == 0, done.printed
