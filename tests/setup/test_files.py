"""Rules about every file of the repository."""

import functools
import os
import re
import subprocess
from pathlib import Path

from a2lib.paths import ROOT

VENDORED = "book/_ext/pages/mathjax/"
TEXT = {".py", ".md", ".ipynb", ".csv", ".toml", ".yml", ".cff", ".txt", ".sh", ".js", ".css", ""}
# A folder of one person's machine; somebody and someone are the names for examples.
LOCAL = re.compile(r"(?<![\w./-])/(?:home|Users|root|work|workspace)/(?!some(?:body|one)\b)[\w.-]+")


def repository_files():
    """Return every file that git tracks or would add, but for what is vendored or deleted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.split("\0")
    else:  # a source archive: no git, and so nothing built beside it yet but what `make` makes
        made = {".venv", "build", "_build", "__pycache__", ".pytest_cache", ".hypothesis"}
        names = []
        for path in ROOT.rglob("*"):
            name = path.relative_to(ROOT)
            if not made & set(name.parts):
                names.append(str(name))
    files = []
    for name in sorted(set(names)):
        path = ROOT / name
        is_own = name and not name.startswith(VENDORED)
        if is_own and path.is_file() and not path.is_symlink():
            files.append(path)
    return files


@functools.cache
def texts():
    """Return the name and the text of each file of words."""
    found = []
    for path in repository_files():
        if path.suffix in TEXT:
            found.append((path.relative_to(ROOT), path.read_text()))
    return found


def test_no_file_names_a_folder_of_one_machine():
    patterns = [LOCAL]
    for folder in (str(ROOT.parent), os.path.expanduser("~")):
        if len(Path(folder).parts) > 2:  # one level (/data, /tmp) is too common a word
            patterns.append(re.compile(rf"(?<![\w./-]){re.escape(folder + os.sep)}"))
    found = []
    for name, text in texts():
        for pattern in patterns:
            for place in pattern.finditer(text):
                line = text.count("\n", 0, place.start()) + 1
                found.append(f"{name}:{line}: {place[0]}")
    assert not found, "\n".join(found)


def test_the_library_synchronises_only_where_it_measures():
    """The rule of .pre-commit-config.yaml, for those who do not use it."""
    measures = Path("src/a2lib/lab")
    for name, text in texts():
        if name.parts[0] == "src" and measures not in name.parents:
            assert "torch.cuda.synchronize" not in text, name


def test_every_link_of_the_documents_leads_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
        for link in links:
            assert "://" in link or (ROOT / link).exists(), f"{name}: {link}"


def test_the_first_page_names_every_page_of_the_contents():
    pages = set(re.findall(r"file: (\S+)", (ROOT / "_toc.yml").read_text()))
    named = set(re.findall(r"\]\((\S+)\.md\)", (ROOT / "book" / "index.md").read_text()))
    records = {page for page in pages if page.startswith("notebooks/")}
    assert pages - records <= named


def test_every_chapter_has_its_topic_in_the_sidebar():
    entries = re.findall(r"- file: (\S+)\n( +title: \S.*)?", (ROOT / "_toc.yml").read_text())
    without = {page for page, title in entries if not title}
    assert without == {"glossary", "references"}
