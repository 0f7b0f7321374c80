"""The folder of an example, as a copy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from example_kit import EXAMPLES, ROOT

from agenttrain.utils.model_path import model_folder


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Go into a copy of an example's folder, with a `python` for its programs."""
    modules = set(sys.modules)

    def go(name: str, python: str = sys.executable) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "my_model").symlink_to(model_folder("bundled:shop"))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the shop's agents import its database
        return folder

    yield go
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
