import fcntl
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import invented_rows
import pytest

from a2lib.paths import ROOT


class Book:
    """A folder with a copy of the repository's book and its data, and the HTML of it."""

    def __init__(self, root: Path):
        self.root = root
        self.html = root / "book" / "_build" / "html"

    def copy(self) -> None:
        ignore = shutil.ignore_patterns("_build", "__pycache__", ".*", "*.egg-info")
        for folder in ("src", "book", "data", "notebooks"):
            shutil.copytree(ROOT / folder, self.root / folder, symlinks=True, ignore=ignore)
        for file in ("_config.yml", "_toc.yml"):
            shutil.copy(ROOT / file, self.root)

    def build(self, *options: str) -> None:
        """Build as a reader does, with ``options`` of jupyter-book."""
        env = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        for name in ("A2LIB_DATA", "TRITON_INTERPRET"):
            env.pop(name, None)
        jupyter_book = Path(sys.executable).with_name("jupyter-book")
        command = [jupyter_book, "build", "book/", *options]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=self.root, env=env, timeout=600, **streams)
        assert done.returncode == 0, done.stdout + done.stderr

    def pages(self) -> list[Path]:
        """Every HTML page; the theme leaves templates of its own in _static."""
        pages = sorted(self.html.rglob("*.html"))
        return [page for page in pages if "_static" not in page.parts]


@pytest.fixture(scope="package")
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


@pytest.fixture
def open_page(book, browser):
    """Open a page of the book; afterwards, that it asked no network, no script failed and no error
    is in the console. Another one in the same ``tab`` takes half the time."""
    contexts, asked, broken = [], [], []

    def new_tab(theme):
        context = browser.new_context(color_scheme=theme)
        contexts.append(context)
        tab = context.new_page()
        tab.read = set()
        tab.on("request", lambda request: (asked.append(request.url), tab.read.add(request.url)))
        tab.on("pageerror", lambda error: broken.append(f"{tab.url}: {error}"))
        tab.on("console", lambda line: broken.append(line.text) if line.type == "error" else None)
        return tab

    def opened(page, size=(1400, 900), theme="light", query="", tab=None):
        tab = tab or new_tab(theme)
        tab.read.clear()
        tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        tab.goto((book.html / page).as_uri() + query)
        if tab.evaluate("!!window.MathJax"):
            tab.evaluate("MathJax.startup.promise.then(() => 0)")
        tab.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")
        return tab

    yield opened
    for context in contexts:
        context.close()
    for url in asked:
        assert url.startswith(("file:", "data:"))
    assert broken == []


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """Return the book, built once in a run of the tests, whichever worker asks. Do not change it.

    Its data are the committed ones, and tiny invented rows of a CPU, as `make book` leaves them.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    root, ready = base / "book", base / "book-is-built"
    book = Book(root)
    with open(base / "book.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(root, ignore_errors=True)  # what a failed build of another worker left
            book.copy()
            rows = []
            for n, pass_ in itertools.product((128, 256), ("forward", "backward", "end_to_end")):
                rows.append(invented_rows.flash(seq_len=n, pass_=pass_))
            invented_rows.write(root / "build" / "data", device="cpu", flash=rows)
            book.build("-W", "-n", "--keep-going")  # warnings are errors
            ready.touch()
    return book


@pytest.fixture
def small_book(tmp_path):
    """A copy of the book whose contents are two pages, index and other, which a test writes."""
    book = Book(tmp_path)
    book.copy()
    contents = "format: jb-book\nroot: index\nchapters:\n  - file: other\n"
    (tmp_path / "_toc.yml").write_text(contents, encoding="utf-8")
    return book
