"""`papermill notebooks/<name>.ipynb -p ...` with no output path, however it is called.

Each test runs the real `papermill` program in a throw-away repository of one tiny notebook. Its own
copy of a2lib stands first on the path, so that the notebooks of that repository are "ours".
"""

import json
import os
import pty
import shutil
import subprocess
import sys

import nbformat
import papermill.cli
import pytest
from notebook_runs import PAPERMILL, copy_package, environment, run, shown_on, write_notebook

from a2lib import papermill_default
from a2lib.lab import Table
from a2lib.paths import ROOT

LITERAL = [PAPERMILL, "notebooks/tiny.ipynb", "-p", "seq_len", "65536"]
OUTPUT = "build/runs/tiny.ipynb"
WHERE = "the executed notebook is in"


def write_tiny(path, text="seq_len: int = 16  # tokens per sequence"):
    """A notebook of two cells that prints its parameter."""
    write_notebook(path, text, "print('measured at', seq_len)")


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "a2lib of mine"  # a space, and a name that messages have
    copy_package(root)
    write_tiny(root / "notebooks" / "tiny.ipynb")
    return root


def in_terminal(repository, command, cwd=None):
    """Run a command on a terminal of its own; returns the exit code and all that it showed."""
    leader, follower = pty.openpty()
    how = {"cwd": cwd or repository, "env": environment(repository), "start_new_session": True}
    how |= dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = subprocess.Popen(command, **how)
    os.close(follower)
    shown = shown_on(leader)
    return process.wait(timeout=120), shown


def assert_ran(repository, said, shown_as=OUTPUT):
    """The executed notebook is there with the parameter in it, and `said` ends with where."""
    notebook = nbformat.read(repository / OUTPUT, as_version=4)
    assert notebook.cells[1].metadata.tags == ["injected-parameters"]
    assert "seq_len = 65536" in notebook.cells[1].source
    assert notebook.cells[2].outputs[0].text == "measured at 65536\n"
    *_, printed, last = said.strip().splitlines()
    assert printed.strip() == "measured at 65536"
    assert last == f"{WHERE} {shown_as}"


def assert_untouched(repository, before):
    assert (repository / "notebooks" / "tiny.ipynb").read_bytes() == before
    assert not (repository / "build").exists()


def test_in_a_terminal_from_another_folder_and_through_a_link(repository):
    elsewhere = repository / "book"
    elsewhere.mkdir()
    (elsewhere / "notebooks").symlink_to("../notebooks")
    code, shown = in_terminal(repository, [*LITERAL, "--cwd", "notebooks"], cwd=elsewhere)
    assert code == 0, shown
    assert_ran(repository, shown, shown_as=f"../{OUTPUT}")


def test_with_a_notebook_piped_in_overwrites_nothing(repository):
    before = (repository / "notebooks" / "tiny.ipynb").read_bytes()
    write_tiny(repository / "other.ipynb", "seq_len: int = 7")
    command = [sys.executable, "-m", "papermill", *LITERAL[1:]]
    done = run(repository, command, input=(repository / "other.ipynb").read_text())
    assert (repository / "notebooks" / "tiny.ipynb").read_bytes() == before and done.stdout == ""
    assert_ran(repository, done.stderr)


BUSY = """
from a2lib.errors import OneLine
class Busy(OneLine, RuntimeError): pass
raise Busy("this CPU is measured by another")"""


def test_a_run_that_fails_says_so_and_where_its_notebook_is(repository):
    done = run(repository, [*LITERAL[:2], "-r", "seq_len", "x", "-y", "{seq_len: [1, 2"], ends=1)
    assert WHERE not in done.stderr  # papermill stopped before it wrote one

    write_tiny(repository / "notebooks" / "tiny.ipynb", f"seq_len: int = 1\n{BUSY}")
    done = run(repository, LITERAL, ends=1)
    assert f"{WHERE} {OUTPUT}" in done.stderr
    cells = nbformat.read(repository / OUTPUT, as_version=4).cells
    [error] = [output for cell in cells for output in cell.get("outputs", ())]
    assert error.traceback == ["Busy: this CPU is measured by another"]
    assert done.stderr.strip().splitlines()[-1] == error.traceback[0]
    assert "measured at" not in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_is_one_clear_line(repository):
    (repository / "build").write_text("a file where a folder belongs")
    done = run(repository, LITERAL, ends=1)
    assert done.stderr.strip() == "build/runs: Not a directory"


def test_a_full_disk_under_the_executed_notebook_is_one_clear_line(repository):
    (repository / OUTPUT).parent.mkdir(parents=True)
    (repository / OUTPUT).symlink_to("/dev/full")
    done = run(repository, LITERAL, ends=1)
    assert "Traceback" not in done.stderr and done.stderr.endswith(": No space left on device\n")


BOMB = "seq_len = 3; open('bomb', 'w')"


@pytest.mark.parametrize(("options", "words"), [
    (["-y", f'{{"{BOMB}": 1}}'], f"unknown parameter {BOMB}"),
    (["-f", "given.yml", "-p", "seq_len", "1"], "unknown parameter 3; allowed are seq_len"),
    (["out.ipynb", "-p", "seqlen", "1"], "seqlen (did you mean seq_len?); allowed are seq_len"),
])  # fmt: skip
def test_a_name_that_is_no_parameter_is_refused_before_a_kernel_starts(repository, options, words):
    before = (repository / "notebooks" / "tiny.ipynb").read_bytes()
    (repository / "given.yml").write_text("3: 1")
    done = run(repository, [PAPERMILL, "notebooks/tiny.ipynb", *options], ends=1)
    assert not (repository / "bomb").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("ParameterError: ") and words in line
    assert_untouched(repository, before)
    assert not (repository / "out.ipynb").exists()


def test_a_notebook_elsewhere_is_untouched(repository):
    write_tiny(repository / "notebooks" / "deeper" / "tiny.ipynb")
    done = run(repository, [PAPERMILL, "notebooks/deeper/tiny.ipynb", "--prepare-only"])
    assert "measured at" in nbformat.reads(done.stdout, as_version=4).cells[-1].source
    assert WHERE not in done.stderr
    write_tiny(repository / "elsewhere" / "tiny.ipynb")
    code, shown = in_terminal(repository, [PAPERMILL, "elsewhere/tiny.ipynb"])
    assert code == 2
    assert "Missing argument 'OUTPUT_PATH'" in shown
    assert not (repository / "build").exists()


def test_an_output_that_is_given_is_used(repository):
    done = run(repository, [*LITERAL, "mine.ipynb", "--prepare-only"])
    assert WHERE not in done.stderr
    assert json.loads((repository / "mine.ipynb").read_text())["cells"]
    done = run(repository, [*LITERAL, "-", "--prepare-only"])
    assert "seq_len = 65536" in done.stdout
    assert not (repository / "build").exists()


def test_a_program_that_imports_papermill_keeps_its_arguments(repository):
    program = "import sys, papermill; print(sys.argv[1:])"
    done = run(repository, [sys.executable, "-c", program, *LITERAL[1:]])
    assert done.stdout.strip() == str(LITERAL[1:])
    assert done.stderr == ""


def test_make_shows_the_last_words_too(repository):
    (repository / "dev").mkdir()
    shutil.copy(ROOT / "dev" / "run_notebook.py", repository / "dev")
    command = [sys.executable, "dev/run_notebook.py", "tiny", "SEQ_LEN=65536"]
    done = run(repository, command)
    assert done.stderr.splitlines()[-2:] == ["measured at 65536", f"{WHERE} {OUTPUT}"]
    done = run(repository, [*command, "X"], ends=1)  # stops before papermill
    assert "measured at" not in done.stderr  # nothing was said, or run


def test_the_terminal_has_the_tables_and_what_the_last_cell_printed():
    output, cell = nbformat.v4.new_output, nbformat.v4.new_code_cell
    long = "\n".join(map(str, range(40)))
    html = {"text/html": "<p>"}
    tables = [output("display_data", html | {"text/plain": text}) for text in ("ms\n3", long)]
    bar = output("display_data", {"text/plain": "100%"})
    rows = output("stream", text="3 rows measured\n")
    cells = [cell(outputs=[rows, bar]), cell(outputs=tables), cell(outputs=[rows])]
    said = papermill_default.results(nbformat.v4.new_notebook(cells=cells))
    assert said.startswith("ms\n3\n\n0\n1\n") and "\n... 16 more lines in the notebook\n" in said
    assert said.endswith("\n\n3 rows measured") and said.count("rows measured") == 1
    assert papermill_default.results(nbformat.v4.new_notebook()) == ""


def test_the_terminal_has_no_rows_that_nobody_asked_for(capsys, tmp_path):
    output = nbformat.v4.new_output
    Table("flash", "no-device", tmp_path).shown([])  # the published ones
    said = output("stream", text=capsys.readouterr().out)
    table = output("display_data", {"text/html": "<p>", "text/plain": "ms\n3"})
    last = nbformat.v4.new_code_cell(outputs=[output("stream", text="rows are there")])
    cells = [nbformat.v4.new_code_cell(outputs=[said, table]), last]
    shown = papermill_default.results(nbformat.v4.new_notebook(cells=cells))
    assert said["text"] and shown == "rows are there"


@pytest.mark.parametrize(("args", "expected"), [
    (["a.ipynb"], ["a.ipynb"]),
    (["-p", "a.ipynb", "b.ipynb", "c.ipynb"], ["c.ipynb"]),
    (["a.ipynb", "--cwd=d", "-kpython3", "-pname", "3", "--no-progress-bar"], ["a.ipynb"]),
    (["--", "a.ipynb", "-p"], ["a.ipynb", "-p"]),
    (["a.ipynb", "-"], ["a.ipynb", "-"]),
    *((["a.ipynb", *more], []) for more in (["b", "c"], ["--unknown", "x"], ["-p", "seq_len"])),
    *((["a.ipynb", option], []) for option in ("-h", "--help-notebook", "--version")),
    ([], []),
])  # fmt: skip
def test_positionals(args, expected):
    assert papermill_default.positionals(papermill.cli.papermill, args) == expected


def test_another_notebook_of_the_repository_is_never_written_over(repository):
    other = repository / "notebooks" / "other.ipynb"
    write_tiny(other)
    before = other.read_bytes()
    write_tiny(repository / "elsewhere" / "mine.ipynb")
    for notebook in ("notebooks/tiny.ipynb", "elsewhere/mine.ipynb"):
        done = run(repository, [PAPERMILL, notebook, "notebooks/other.ipynb"], ends=1)
        assert "would be written over" in done.stderr and other.read_bytes() == before


def test_an_output_that_lies_in_no_folder_is_one_clear_line(repository):
    done = run(repository, [*LITERAL, "nowhere/mine.ipynb"], ends=1)
    assert done.stderr.splitlines()[-1] == "output folder nowhere doesn't exist."
    assert "Traceback" not in done.stderr
