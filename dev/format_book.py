"""Format the code cells and the ```python examples of the book's pages as ruff formats a file, and
fold long captions and alternative texts in the cells' options.

    python dev/format_book.py            # rewrite book/*.md
    python dev/format_book.py --check    # name the pages that would change, exit 1 if there is one

ruff itself reads Python files and notebooks, not MyST pages.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml

BOOK = Path(__file__).resolve().parents[1] / "book"
# The fence, a cell's options (":tags: [...]", or YAML between lines of "---"), the code, the fence.
CELL = re.compile(
    r"^(?P<head>```python\n|```\{code-cell\}[^\n]*\n(?:---\n.*?^---\n|(?::[^\n]*\n)*)\n?)"
    r"(?P<code>.*?)^(?P<end>```)$",
    re.M | re.S,
)
TEXT = re.compile(r'^(?P<name> *(?:caption|alt)): (?P<text>".*")$', re.M)
WIDTH = 100


def formatted(page: str) -> str:
    """Return the text of a page with each of its code cells and examples formatted."""
    return CELL.sub(format_cell, page)


def format_cell(cell: re.Match) -> str:
    return TEXT.sub(fold_text, cell["head"]) + format_code(cell["code"]) + cell["end"]


def fold_text(option: re.Match) -> str:
    """Return a caption or alternative text in lines that fit, as YAML folds them."""
    if len(option[0]) <= WIDTH:
        return option[0]
    name = option["name"]
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    text = yaml.safe_load(option["text"])
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{name}: >-\n{lines}"


def format_code(code: str) -> str:
    """Return `code` as ruff writes it; raises CalledProcessError where it is no Python."""
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "format", "--stdin-filename", "cell.py", "-"]
    done = subprocess.run(
        command, input=code, capture_output=True, text=True, check=True, cwd=BOOK.parent
    )
    return done.stdout


def main() -> int:
    check = "--check" in sys.argv[1:]
    changed = []
    for path in sorted(BOOK.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = formatted(before)
        if after != before:
            changed.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in changed:
        print(f"{path.relative_to(BOOK.parent)}: {'would be' if check else ''} formatted")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
