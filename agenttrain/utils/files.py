"""The folder of the YAML files, and the options of each group."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def conf_folder() -> Path:
    """Return the folder of train.yaml: packaged, or the repository's in an editable install."""
    packaged = PACKAGE / "conf"
    return packaged if packaged.is_dir() else PACKAGE.parent / "conf"


def list_groups(*folders: Path) -> dict[str, list[str]]:
    """Return group -> its options, sorted, e.g. ``{"algorithm": ["grpo", "rloo"], …}``.

    `algorithm/objective` is a group too. In the folders after the first, a group within a group
    counts only if the first folder has it.
    """
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in (*folder.glob("*/*.yaml"), *folder.glob("*/*/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if folder == folders[0] or "/" not in group or group in options:
                options.setdefault(group, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}
