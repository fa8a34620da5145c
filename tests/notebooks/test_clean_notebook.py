"""A committed notebook holds no time, no local path and no cell of another run."""

import runpy
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from a2lib.paths import ROOT

clean_notebook = SimpleNamespace(**runpy.run_path(ROOT / "dev" / "clean_notebook.py"))


@pytest.fixture
def executed():
    first = new_code_cell("a: int = 1  # one", execution_count=1, metadata={"tags": ["parameters"]})
    injected = new_code_cell("a = 2", execution_count=2, metadata={"tags": ["injected-parameters"]})
    last = new_code_cell("a", execution_count=3)
    last.metadata |= {"papermill": {"duration": 1}, "execution": {"iopub.status.busy": "now"}}
    last.outputs = [
        new_output("stream", text=f"{ROOT}/data/x.csv\n  /home/someone/x.py: 1/2\n"),
        new_output(
            "execute_result", data={"text/plain": "2", "image/png": "aGk="}, execution_count=3
        ),
    ]
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "papermill": {"input_path": "/home/someone/flash.ipynb"},
    }
    return new_notebook(cells=[first, injected, last], metadata=metadata)


def test_what_goes_and_what_stays(executed, tmp_path):
    path = tmp_path / "run.ipynb"
    nbformat.write(executed, path)
    assert clean_notebook.main([str(path)]) == 0
    cleaned = nbformat.read(path, as_version=4)
    assert [cell.source for cell in cleaned.cells] == ["a: int = 1  # one", "a"]
    assert [cell.execution_count for cell in cleaned.cells] == [1, 2]
    stream, result = cleaned.cells[1].outputs
    assert stream.text == "data/x.csv\n  .../x.py: 1/2\n"
    assert result.data["image/png"] == "aGk=" and result.execution_count == 2
    text = nbformat.writes(cleaned)
    assert "papermill" not in text and "iopub" not in text and "/home/" not in text
    assert cleaned.metadata.kernelspec.name == "python3"
    assert nbformat.writes(clean_notebook.clean(cleaned)) == text


def test_a_failed_run_is_refused_and_left_alone(executed, tmp_path, capsys):
    path = tmp_path / "failed.ipynb"
    executed.cells[2].outputs = [new_output("error", ename="E", evalue="v", traceback=[])]
    nbformat.write(executed, path)
    before = path.read_text()
    assert clean_notebook.main([str(path), str(tmp_path / "none.ipynb")]) == 1
    assert path.read_text() == before
    assert "holds an error: E: v" in capsys.readouterr().err
    executed.cells[2].outputs = []
    executed.cells[2].execution_count = None
    with pytest.raises(clean_notebook.NotACleanRun, match="not run"):
        clean_notebook.clean(executed)
