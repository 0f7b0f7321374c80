"""A trained run that tests read and none changes: made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from agenttrain.cli import main


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the bundled agent, in a folder named `run`. Change a copy of it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["debug=tiny", "tracker=none", f"hydra.run.dir={folder}"]) == 0
    return folder
