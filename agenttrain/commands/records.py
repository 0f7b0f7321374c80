"""Verbs that read a recorded run: `view`, `replay` and `rescore`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from agenttrain.commands.arguments import parse_folder
from agenttrain.settings.checks import validate
from agenttrain.settings.command_line import take_trust
from agenttrain.settings.compose import Source, check_writable, hydra_session, open_keys
from agenttrain.settings.saved import replayed, rescored, viewed
from agenttrain.tracking.pictures import FOLDER as PICTURES
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.names import did_you_mean

REPLAY = (
    "replay: give a run folder and what of it, replay <run folder> [step=N] [rollout=ID] "
    "[tools=recorded|live] [trust=true]; or the folder of a crash, replay "
    "<run folder>/crash/step-000012"
)
VIEW = "view: give a run folder and perhaps a step: view <run folder> [step=N] [to=FILE]"
RESCORE = (
    "rescore: give a run folder, rescore <run folder> [step=N] reward=[…] [to=FILE] [trust=true]"
)
TOOLS = ("recorded", "live")
STAGES: dict[str, tuple[str, ...]] = {
    "weights": (),
    "logprobs": (),
    "update": ("algorithm",),
    "reward": ("reward", "data"),
}
"""Stage of a step that may fail -> sections whose code runs when it is repeated."""


def replay(arguments: Sequence[str]) -> int:
    """Run `replay <run or crash folder> …`.

    Returns exit code 0 for identical rollouts or the same culprit, else 1.
    """
    words, trust = take_trust(arguments)
    typed = parse_folder(words, ("step", "rollout", "tools"), REPLAY)
    if typed.overrides:
        key = typed.overrides[0].partition("=")[0]
        hint = did_you_mean(key, ("step", "rollout", "tools"))
        raise ConfigError(f"{typed.overrides[0]}: is not an option of replay{hint}; {REPLAY}")
    tools = typed.words.get("tools", "recorded")
    if tools not in TOOLS:
        hint = did_you_mean(tools, TOOLS)
        raise ConfigError(f"tools={tools}: expected one of {', '.join(TOOLS)}{hint}")
    step = typed.step(REPLAY)
    crash = _crash_stage(typed.folder) if not typed.words else None
    # tools.json has the schemas of the run's tools; runs of earlier versions have none.
    declared = tools == "recorded" and (typed.folder / "tools.json").is_file()
    if crash is not None:
        runs = STAGES[crash]
    else:
        runs = (
            ("data", "rollout") if declared else ("data", "rollout", "tools", "environment", "user")
        )
    with hydra_session(Source()):
        config = replayed(typed.folder, Source(), trust=trust, runs=runs).config
    try:
        if crash is not None:
            from agenttrain.commands.replay_crash import replay_crash  # torch comes with it

            return replay_crash(config, typed.folder)
        from agenttrain.commands.recorded import written_steps
        from agenttrain.commands.replay import replay_rollouts

        if step is None:
            step = written_steps(typed.folder, f"replay {typed.folder}")[-1]
        return replay_rollouts(
            config,
            typed.folder,
            step=step,
            rollout_id=typed.words.get("rollout"),
            live=tools == "live",
        )
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


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


def rescore(arguments: Sequence[str]) -> int:
    """Run `rescore <run folder> …`: print both means, and write every rollout's with `to=`."""
    words, trust = take_trust(arguments)
    typed = parse_folder(words, ("step", "to"), RESCORE)
    if not any(text.startswith("reward") for text in typed.overrides):
        raise ConfigError(f"by which reward? {RESCORE}")
    step, to = typed.step(RESCORE), typed.words.get("to")
    with hydra_session(Source()):
        changes = open_keys(typed.overrides)
        config = rescored(typed.folder, changes, Source(), trust=trust).config
    validate(config, code=("reward", "data"))
    if to is not None:
        check_new_file(to)
    try:
        from agenttrain.commands.rescore import rescore as rescore_run

        return rescore_run(config, typed.folder, step=step, to=Path(to) if to else None)
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def view(arguments: Sequence[str]) -> int:
    """Run `view <run folder> [step=N] [to=FILE]`: write the page and print its path.

    The page is written beside the rollouts unless `to` names another file.
    """
    typed = parse_folder(arguments, ("step", "to"), VIEW)
    if typed.overrides:
        raise ConfigError(f"{typed.overrides[0]}: is not an option of view; {VIEW}")
    folder, number, to = typed.folder, typed.step(VIEW), typed.words.get("to")
    with hydra_session(Source()):
        composed = viewed(folder, Source())
    written = sorted((folder / "rollouts").glob("step-*.jsonl"))
    if not written:
        raise ConfigError(f"view {folder}: the run has written no rollouts (tracker.rollouts)")
    numbers = [int(path.stem.removeprefix("step-")) for path in written]
    step = numbers[-1] if number is None else number
    if step not in numbers:
        known = f"there are {numbers[0]} to {numbers[-1]}"
        raise ConfigError(f"view step={step}: no rollouts of that step; {known}")
    if to is None:
        remedy = "write the page elsewhere: to=page.html"
        check_writable(folder / "rollouts", f"view {folder}", remedy)
    else:
        check_new_file(to)
    from agenttrain.runs.report import write_page

    print(page := write_page(composed.config, folder, step, Path(to) if to else None))
    pictures = folder / "rollouts" / PICTURES
    if pictures.is_dir() and "data:image/" in page.read_text(encoding="utf-8"):
        print("the page holds the images of its rollouts", file=sys.stderr)
    return 0


def check_new_file(to: str) -> None:
    """Raise ConfigError if the file of `to=` exists or cannot be written."""
    path = Path(to)
    if path.exists():
        raise ConfigError(f"to={to}: is there already; name another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"to={to}: there is no folder {path.parent}; make it, or name another")
    check_writable(path.absolute().parent, f"to={to}", "name a file in another folder")
