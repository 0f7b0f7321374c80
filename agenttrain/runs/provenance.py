"""A run's own record: config.yaml and summary.json, each replaced atomically."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agenttrain.settings.trust import SIGNATURE, signature
from agenttrain.tracking.run_folder import PACKAGES, write_atomically


def write_config(
    folder: Path, config: dict[str, Any], certificate: str | None, kernel: str | None = None
) -> None:
    """Write config.yaml: the resolved settings, and under `provenance` what they ran with.

    `certificate` is the chat template's hash; None before the template was certified. `kernel`
    computes the policy's attention; None before the model was loaded.
    """
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    provenance = {
        "versions": {**versions, "python": platform.python_version()},
        "git_revision": _git_revision(),
        "template_certificate": certificate,
        "training_kernel": kernel,
        SIGNATURE: signature(config),
    }
    text = OmegaConf.to_yaml(OmegaConf.create({**config, "provenance": provenance}))
    write_atomically(folder / "config.yaml", text)


def _git_revision() -> str | None:
    """Return the working folder's commit, with `-dirty` when it has changes; None outside git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
