"""`agenttrain timeline`: a page of who sampled, waited, trained, synced and saved when."""

from __future__ import annotations

import re
from argparse import Namespace

from agenttrain.settings.compose import check_writable
from agenttrain.tracking.run_folder import read_summary
from agenttrain.tracking.timeline_page import render_timeline
from agenttrain.types import ConfigError

PAGE = "timeline.html"
STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def timeline(args: Namespace) -> int:
    """Write the page and print its path; raises ConfigError.

    It is `timeline.html` in the run's folder, and made anew each time, unless `--to` names a file.
    """
    folder = args.folder
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: holds no run (there is no config.yaml); name a run's folder")
    steps = _read_steps(args.steps)
    if args.to is None:
        check_writable(folder, f"timeline {folder}", "write the page elsewhere: --to page.html")
    resolved = folder.resolve()
    status = read_summary(folder).get("status")
    try:
        page = render_timeline(
            folder,
            title=f"{resolved.parent.name}/{resolved.name}",
            steps=steps,
            state="it goes on" if status == "running" else "",
        )
    except ValueError as error:
        raise ConfigError(f"timeline {error}") from error
    path = args.to or folder / PAGE
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


def _read_steps(text: str | None) -> tuple[int, int] | None:
    """Return the first and the last step of `--steps`, or None without it. Raises ConfigError.

    Example: ``"10-20"`` -> ``(10, 20)``, ``"10"`` -> ``(10, 10)``.
    """
    if text is None:
        return None
    match = STEPS.fullmatch(text)
    if match is None:
        raise ConfigError(f"--steps {text}: give the first and the last: --steps 10-20")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"--steps {text}: the first is after the last")
    return first, last
