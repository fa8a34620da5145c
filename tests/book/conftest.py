import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from a2lib.measure.sections import notebooks
from a2lib.paths import ROOT

EMPTY_NOTEBOOK = {
    "cells": [{"cell_type": "markdown", "metadata": {}, "source": ["# Lab record\n"]}],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 4,
}


# Pages whose words follow the rows of synthetic.py, and the one that the front page's numbers link.
FULL = re.compile(r"index|questions|benchmark|flash(-.*)?")
HEADING_OR_LABEL = re.compile(r"^(?:#+ .*|\([\w-]+\)=)$", re.M)


class Book:
    """A copy of the repository's book with invented data, built into HTML."""

    def __init__(self, root: Path, copy: bool = True):
        self.root = root
        self.html = root / "book" / "_build" / "html"
        self.without_rows = root / "without-rows"
        if not copy:
            return
        ignore = shutil.ignore_patterns("_build", "__pycache__", "measured", "*.egg-info")
        for folder in ("src", "book", "data"):
            shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignore)
        for file in ("_config.yml", "_toc.yml"):
            shutil.copy(ROOT / file, root)
        (root / "notebooks").mkdir()
        for notebook in [f"{name}.ipynb" for name in notebooks()]:
            if (ROOT / "notebooks" / notebook).is_file():
                shutil.copy(ROOT / "notebooks" / notebook, root / "notebooks")
            else:
                (root / "notebooks" / notebook).write_text(json.dumps(EMPTY_NOTEBOOK))

    def shortened(self) -> dict[Path, str]:
        """Leave of each page that runs code and is not in FULL its headings and labels, which is
        what others refer to; returns the pages' texts by file."""
        texts = {}
        for page in sorted((self.root / "book").glob("*.md")):
            text = page.read_text(encoding="utf-8")
            if "{code-cell}" in text and not FULL.fullmatch(page.stem):
                texts[page] = text
                page.write_text("\n\n".join(HEADING_OR_LABEL.findall(text)), encoding="utf-8")
        return texts

    def build(self) -> subprocess.CompletedProcess:
        """Build as a reader does, warnings being errors."""
        unset = ("A2LIB_DATA", "TRITON_INTERPRET")
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"PYTHONPATH": str(self.root / "src")}
        command = Path(sys.executable).with_name("jupyter-book")
        return subprocess.run(
            [command, "build", "book/", "-W", "-n", "--keep-going"], cwd=self.root, env=env,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    def pages(self) -> list[Path]:
        """Every HTML page; the theme leaves templates of its own in _static."""
        pages = sorted(self.html.rglob("*.html"))
        return [page for page in pages if "_static" not in page.parts]


def synthetic():
    """The module that writes invented rows."""
    file = ROOT / "tests" / "report" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("a2lib_tests_synthetic", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(book: Book) -> Book:
    """The book after a build without a warning."""
    done = book.build()
    assert done.returncode == 0, done.stdout + done.stderr
    return book


@pytest.fixture(scope="module")
def browser():
    """A Chromium that asks no network of itself; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=quiet)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """The book, built once in a run of the tests, whichever worker asks. Do not change it.

    It has a complete invented sweep of the published device, and tiny CPU rows of `make book`. They
    came between two builds: what the first one wrote, of no row, is in `without_rows`. It had the
    pages in full that these rows change; of the others, the second build has no row either.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    root, ready = base / "book", base / "book-is-built"
    with open(base / "book.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists():
            return Book(root, copy=False)
        shutil.rmtree(root, ignore_errors=True)  # what a failed build of another worker left
        root.mkdir()
        book = Book(root)
        texts = book.shortened()
        built(book)
        shutil.copytree(book.html, book.without_rows)
        for page, text in texts.items():
            page.write_text(text, encoding="utf-8")
        rows = synthetic()
        rows.write(root / "data")
        rows.write(root / "build" / "data", device="cpu", ceiling=False,
                   keep=lambda shape: shape[0] == "eager" and shape[4] <= 256)  # fmt: skip
        built(book)
        ready.touch()
        return book
