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
    """Every file that git tracks or would add, but for what is vendored or deleted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.split("\0")
    else:  # a source archive: no git, and so nothing built beside it yet but what `make` makes
        made = {".venv", "build", "_build", "__pycache__", ".pytest_cache", ".hypothesis"}
        walk = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = [str(path) for path in walk if not made & set(path.parts)]
    paths = {ROOT / name for name in names if name and not name.startswith(VENDORED)}
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


@functools.cache
def texts():
    files = [path for path in repository_files() if path.suffix in TEXT]
    return [(path.relative_to(ROOT), path.read_text()) for path in files]


def local_folders(*places):
    """Patterns of these folders in a text. One level (/data, /tmp) is too common a word."""
    deep = {place for place in places if len(Path(place).parts) > 2}
    return [re.compile(rf"(?<![\w./-]){re.escape(place + os.sep)}") for place in sorted(deep)]


def test_no_file_names_a_folder_of_one_machine():
    personal = local_folders(str(ROOT.parent), os.path.expanduser("~"))
    found = [
        f"{name}:{text.count(chr(10), 0, place.start()) + 1}: {place[0]}"
        for name, text in texts()
        if name != Path("tests/setup/test_files.py")
        for pattern in (LOCAL, *personal)
        for place in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_folders_of_a_machine_are_found_as_paths_alone():
    assert LOCAL.search("see /home/ann/notes") and LOCAL.search('"/root/.cache/x"')
    assert not LOCAL.search("https://example.org/home/index.html")
    assert not LOCAL.search("book/home/x, ../home/y")
    assert local_folders("/", "/data", "/root") == []
    [pattern] = local_folders("/srv/ann")
    assert pattern.search('open("/srv/ann/x.csv")')
    assert not pattern.search("build/srv/ann/x.csv") and not pattern.search("/srv/anna/x")


def test_the_library_synchronises_only_where_it_measures():
    """The rule of .pre-commit-config.yaml, for those who do not use it."""
    call = "torch.cuda." + "synchronize"
    allowed = Path("src/a2lib/lab")
    found = [
        str(name)
        for name, text in texts()
        if name.parts[0] == "src" and call in text and allowed not in name.parents
    ]
    assert not found


def test_every_link_of_the_documents_leads_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
        missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
        assert not missing, name


def test_the_first_page_names_every_page_of_the_contents():
    pages = set(re.findall(r"file: (\S+)", (ROOT / "_toc.yml").read_text()))
    named = set(re.findall(r"\]\((\S+)\.md\)", (ROOT / "book" / "index.md").read_text()))
    assert {page for page in pages if "/" not in page} <= named


def test_every_chapter_has_its_topic_in_the_sidebar():
    entries = re.findall(r"- file: (\S+)\n( +title: \S.*)?", (ROOT / "_toc.yml").read_text())
    without = {page for page, title in entries if not title}
    assert without == {"glossary", "references"}
