"""Where the YAML files are, and which options each group has."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def conf_folder() -> Path:
    """The folder of train.yaml: the packaged one, else the repository's (editable install)."""
    packaged = PACKAGE / "conf"
    return packaged if packaged.is_dir() else PACKAGE.parent / "conf"


def list_groups(*folders: Path) -> dict[str, list[str]]:
    """Group -> its options, sorted, e.g. ``{"algorithm": ["grpo", "rloo"], …}``."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}
