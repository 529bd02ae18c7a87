"""The notebooks run from top to bottom wherever the package is installed, and are committed with what they print."""

from __future__ import annotations

import pathlib
import shutil

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks_to_run() -> None:
    """An empty folder would make every other test here pass."""
    assert "01_first_batch.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.timeout(600)  # a hang limit; the notebooks take seconds
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_without_an_error(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # no start-up files of the user, and none left behind
    copy = shutil.copytree(FOLDER, tmp_path / "notebooks")
    notebook = nbformat.read(copy / path.name, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=550, kernel_name="python3", resources={"metadata": {"path": str(copy)}})
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_one_run_from_top_to_bottom_left_it(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < 2**20
