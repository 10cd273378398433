"""The notebook of the documentation runs in a Jupyter kernel, and shows what it says."""

import pathlib

import nbclient
import nbformat
import pytest

import docs

_PATH = pathlib.Path(docs.__path__[0]) / "notebook.ipynb"


def executed(folder):
    """Returns the notebook with the outputs of a run in a folder."""
    notebook = nbformat.read(_PATH, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=300, resources=resources, record_timing=False
    ).execute()
    return notebook


def shown(notebook):
    """Returns the kinds of what each cell of code shows, and the texts of results."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    results = [
        [x.data for x in cell.outputs if x.output_type == "execute_result"] for cell in cells
    ]
    return [sorted(data) for found in results for data in found], [
        data["text/plain"] for found in results for data in found
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_has(tmp_path):
    notebook = executed(tmp_path)
    kinds, texts = shown(notebook)
    assert kinds == shown(nbformat.read(_PATH, as_version=4))[0]
    assert ["image/png", "text/plain"] in kinds
    assert all(len(text) < 1500 and text.count("\n") < 20 for text in texts)
    assert any(text.startswith("(70, ") for text in texts)
