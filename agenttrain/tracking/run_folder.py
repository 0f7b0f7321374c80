"""What a run writes about itself: config.yaml and summary.json, each replaced atomically."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agenttrain.tracking.json_lines import finite

PACKAGES = ("agenttrain", "torch", "transformers", "accelerate", "hydra-core", "trackio")


def write_config(folder: Path, config: dict[str, Any], certificate: str) -> None:
    """config.yaml: the resolved settings, and under `provenance` what they ran with."""
    provenance = {
        "versions": {**_versions(), "python": platform.python_version()},
        "git_revision": _git_revision(),
        "template_certificate": certificate,
    }
    text = OmegaConf.to_yaml(OmegaConf.create({**config, "provenance": provenance}))
    write_atomically(folder / "config.yaml", text)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _git_revision() -> str | None:
    """The commit of the working folder, with `-dirty` when it has changes; None outside git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary so far; empty before there is one."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def update_summary(folder: Path, **changes: Any) -> None:
    """Merge `changes` into summary.json; a change to None takes the entry out."""
    merged = {**read_summary(folder), **changes}
    summary = {name: value for name, value in merged.items() if value is not None}
    write_atomically(folder / "summary.json", json.dumps(finite(summary), indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old text or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
