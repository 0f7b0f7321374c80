"""A run's own record: config.yaml and summary.json, each replaced atomically."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agenttrain.settings.trust import signature
from agenttrain.tracking.run_folder import PACKAGES
from agenttrain.utils.files import write_atomically


def write_config(
    folder: Path, config: dict[str, Any], certificate: str | None, kernel: str | None = None
) -> None:
    """Write config.yaml: the resolved settings and, under `provenance`, the versions they ran with.

    `certificate` is the hash of the chat template's certificate, None before the template is
    certified. `kernel` names the attention kernel of the training, None before the model is loaded.
    """
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    # The working folder's commit, with `-dirty` when it has changes; None outside git.
    revision = None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run(describe, capture_output=True, text=True, timeout=10)
        revision = process.stdout.strip() or None
    provenance = {
        "versions": {**versions, "python": platform.python_version()},
        "git_revision": revision,
        "template_certificate": certificate,
        "training_kernel": kernel,
        **signature(config),  # lets this user resume settings that name code
    }
    text = OmegaConf.to_yaml(OmegaConf.create({**config, "provenance": provenance}))
    write_atomically(folder / "config.yaml", text)
