"""The notebooks run from the first cell to the last, with fewer steps, and are stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(name: str, folder: Path) -> list[Any]:
    """The cells of a notebook after it was run in `folder`."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(folder)}}).execute()
    return list(notebook.cells)


def text_of(cells: list[Any]) -> str:
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NOTEBOOK_STEPS": "2", "NOTEBOOK_HELD_OUT": "4", "NOTEBOOK_GROUPS": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")


@pytest.mark.filterwarnings("ignore")  # of the packages that run notebooks
def test_the_training_notebook(tmp_path: Path) -> None:
    cells = executed("train.ipynb", tmp_path)
    assert "staleness 0:" in text_of(cells)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.html").is_file()


@pytest.mark.filterwarnings("ignore")
def test_the_simulation_notebook(tmp_path: Path) -> None:
    text = text_of(executed("simulate.ipynb", tmp_path))
    assert "one_step_off" in text
    assert "5 train, 3 generate:" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs_and_are_tested(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    assert f'executed("{path.name}"' in Path(__file__).read_text()
