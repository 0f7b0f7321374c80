"""The notebook of examples/, executed by a kernel as Jupyter does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from example_kit import EXAMPLES, ROOT

nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install '.[test]'")
NOTEBOOK = EXAMPLES / "notebook.ipynb"


def results(notebook) -> list[str]:
    """The value of each cell that shows one, as text."""
    return [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]


def test_the_committed_notebook_was_executed_from_the_top():
    """`scripts/notebook` writes its outputs."""
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(results(notebook)) == 4


@pytest.mark.slow
def test_the_notebook_trains_goes_on_and_loads_the_policy(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executed = runpy.run_path(str(ROOT / "scripts" / "notebook"))["executed"]
    run, scores, steps, resumed = results(executed(str(tmp_path)))
    assert "status='finished'" in run
    before, after = eval(scores)
    assert after > before
    assert [step for step, _ in eval(steps)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert eval(resumed) == ("finished", 10)
