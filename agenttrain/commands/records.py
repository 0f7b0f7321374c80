"""Verbs that read a recorded run: `view`, `replay` and `rescore`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from agenttrain.commands.verb import as_config_error
from agenttrain.settings.checks import validate
from agenttrain.settings.command_line import source_of, take_trust
from agenttrain.settings.compose import Source, check_writable, hydra_session, open_keys
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.saved import saved_settings
from agenttrain.tracking.pictures import FOLDER as PICTURES
from agenttrain.tracking.rollouts import written_step
from agenttrain.types import ConfigError

SCORING = ("reward", "data")
"""Sections whose code runs when rollouts are scored."""
STAGES: dict[str, tuple[str, ...]] = {
    "weights": (),
    "logprobs": (),
    "update": ("algorithm",),
    "reward": SCORING,
}
"""Stage of a step that may fail -> sections whose code runs when it is repeated."""


def replay(args: Namespace) -> int:
    """Repeat the rollouts of a step, or the stage of a step that crashed.

    The folder is a run or a crash bundle, which a crash leaves. Of a bundle the failed stage is
    repeated (STAGES), unless `--step`, `--rollout` or `--tools live` asks for rollouts. Returns
    exit code 0 for identical rollouts or the same culprit, else 1. Raises ConfigError.
    """
    folder, step, trust = args.folder, args.step, args.trust == "true"
    live = args.tools == "live"
    asks_for_rollouts = step is not None or args.rollout is not None or live
    failed_stage = None if asks_for_rollouts else _crash_stage(folder)
    # Sections of the saved settings whose code will run: the user has to trust it.
    code: tuple[str, ...]
    if failed_stage is not None:
        code = STAGES[failed_stage]
    elif live or not (folder / "tools.json").is_file():
        code = ("data", "rollout", "tools", "environment", "user")
    else:  # the schemas in tools.json stand in for the code of tools
        code = ("data", "rollout")
    with hydra_session(Source()):
        config = saved_settings(
            f"replay {folder}", folder, Source(), used_sections=code, trust=trust
        ).config
    with as_config_error():
        if failed_stage is not None:
            from agenttrain.commands.replay_crash import replay_crash  # torch comes with it

            return replay_crash(config, folder)
        from agenttrain.commands.replay import replay_rollouts

        step = written_step(folder, step, f"replay {folder}")
        return replay_rollouts(config, folder, step=step, rollout_id=args.rollout, live=live)


def _crash_stage(folder: Path) -> str | None:
    """Return the stage that failed if the folder is a crash bundle, else None."""
    file = folder / "crash.json"
    if not file.is_file():
        return None
    try:
        stage = json.loads(file.read_text(encoding="utf-8"))["stage"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"replay {folder}: its crash.json cannot be read: {error}") from error
    if stage not in STAGES:
        raise ConfigError(
            f"replay {folder}: its crash.json names the stage {stage}; known are: "
            f"{', '.join(STAGES)}"
        )
    return str(stage)


def rescore(args: Namespace, overrides: Sequence[str]) -> int:
    """Score stored rollouts with another reward; print the old and the new mean.

    `--to` writes the rewards of every rollout. Returns the exit code; raises ConfigError.
    """
    config = _settings_for_rescore(args, overrides)
    with as_config_error():
        from agenttrain.commands.rescore import rescore as rescore_run

        return rescore_run(config, args.folder, step=args.step, to=args.to)


def check_rescore(args: Namespace, overrides: Sequence[str]) -> int:
    """Check the settings of `rescore`; raises ConfigError."""
    if args.folder is None:
        raise ConfigError("check rescore: of which run? name its folder: check rescore FOLDER …")
    _settings_for_rescore(args, overrides)
    print("these settings fit agenttrain rescore")
    return 0


def _settings_for_rescore(args: Namespace, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of the run with the typed rewards, checked; raises ConfigError."""
    settings, trust = take_trust(overrides)
    if not any(text.startswith("reward") for text in settings):
        raise ConfigError("reward: by which one? add reward=[…]")
    source = source_of(args)
    with hydra_session(source):
        config = saved_settings(
            f"rescore {args.folder}",
            args.folder,
            source,
            overrides=open_keys(settings),  # reward functions have keys that no YAML lists
            allowed=("reward",),
            used_sections=SCORING,
            trust=trust,
        ).config
    validate(config, code=SCORING)
    return config


def view(args: Namespace) -> int:
    """Write the page of a run, or of a step, and print its path; raises ConfigError.

    The page of a run has the rollouts that are worth a look. It is written beside the rollouts
    unless `--to` names another file.
    """
    folder = args.folder
    with hydra_session(Source()):
        composed = saved_settings(f"view {folder}", folder, Source())
    step = written_step(folder, args.step, f"view {folder}")
    if args.to is None:
        remedy = "write the page elsewhere: --to page.html"
        check_writable(folder / "rollouts", f"view {folder}", remedy)
    from agenttrain.runs.report import write_front_page, write_page

    with as_config_error():
        if args.step is None:
            page = write_front_page(composed.config, folder, args.to)
        else:
            page = write_page(composed.config, folder, step, args.to)
    print(page)
    # Only a run with pictures can have a page with images: other pages need not be read.
    pictures = folder / "rollouts" / PICTURES
    if pictures.is_dir() and "data:image/" in page.read_text(encoding="utf-8"):
        print("the page holds the images of its rollouts", file=sys.stderr)
    return 0
