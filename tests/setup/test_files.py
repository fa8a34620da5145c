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
    allowed = Path("src/a2lib/measure")
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


def test_the_log_and_the_rules_stay_short_enough_to_be_read():
    for name, most in {"dev/log.md": 500, "CONTRIBUTING.md": 150}.items():
        lines = len((ROOT / name).read_text().splitlines())
        assert lines <= most, f"{name}: {lines} lines; merge entries, drop what the code shows"


# Kernels and wrappers are longer: what belongs together there is one class or one file of kernels.
LONG = {"attention/kernels.py", "attention/passes.py", "attention/hopper_backward.py"}
LONG |= {"parallel/copy_engines.py", "parallel/ddp.py", "parallel/fsdp/wrapper.py"}


def test_the_house_stays_small():
    """Code writes no sentence of the book, and no room grows back unseen: a change that needs more
    lines says why, and moves a limit."""
    lines = {str(name): len(text.splitlines()) for name, text in texts()}

    def room(folder, ending=".py"):
        return {n: k for n, k in lines.items() if n.startswith(folder) and n.endswith(ending)}

    most = {"src/": 36_766, "src/a2lib/report/": 6_127, "tests/": 24_000, "tests/report/": 1_116}
    assert {folder: n for folder in most if (n := sum(room(folder).values())) > most[folder]} == {}
    modules = {name.removeprefix("src/a2lib/"): n for name, n in room("src/").items()}
    assert {name: n for name, n in modules.items() if n > (500 if name in LONG else 350)} == {}
    assert {name: n for name, n in room("").items() if n > 500} == {}
    assert {page: n for page, n in room("book/", ".md").items() if n > 505} == {}
