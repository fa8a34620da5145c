"""Format the code cells and the ```python examples of the book's pages as ruff formats a file.

    python dev/format_book.py            # rewrite book/*.md
    python dev/format_book.py --check    # name the pages that would change, exit 1 if there is one

ruff itself reads Python files and notebooks, not MyST pages.
"""

import re
import subprocess
import sys
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1] / "book"
# The fence, a cell's options (":tags: [...]", or YAML between lines of "---"), the code, the fence.
CELL = re.compile(
    r"^(?P<head>```python\n|```\{code-cell\}[^\n]*\n(?:---\n.*?^---\n|(?::[^\n]*\n)*)\n?)"
    r"(?P<code>.*?)^(?P<end>```)$",
    re.M | re.S,
)


def formatted(page: str) -> str:
    """Return the text of a page with each of its code cells and examples formatted."""
    return CELL.sub(lambda cell: cell["head"] + format_code(cell["code"]) + cell["end"], page)


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
