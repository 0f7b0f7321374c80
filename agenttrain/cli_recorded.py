"""The verbs on what a run has recorded: `view`, `replay` and `rescore`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.config.compose import Source, hydra_session, open_keys
from agenttrain.config.errors import ConfigError
from agenttrain.config.folder_command import parse_folder
from agenttrain.config.saved import replayed, rescored, viewed
from agenttrain.config.suggest import did_you_mean
from agenttrain.config.validate import validate
from agenttrain.types import AgenttrainError

REPLAY = (
    "replay: give a run folder and what of it, replay <run folder> [step=N] [rollout=ID] "
    "[tools=recorded|live]; or the folder of a crash, replay <run folder>/crash/step-000012"
)
RESCORE = "rescore: give a run folder, rescore <run folder> [step=N] reward=[…] [to=FILE]"
TOOLS = ("recorded", "live")


def replay(arguments: Sequence[str]) -> int:
    """`replay <run or crash folder> …`. Exit code 0: identical, or the same culprit; 1: not."""
    typed = parse_folder(arguments, ("step", "rollout", "tools"), REPLAY)
    if typed.overrides:
        key = typed.overrides[0].partition("=")[0]
        hint = did_you_mean(key, ("step", "rollout", "tools"))
        raise ConfigError(f"{typed.overrides[0]}: is not an option of replay{hint}; {REPLAY}")
    tools = typed.words.get("tools", "recorded")
    if tools not in TOOLS:
        hint = did_you_mean(tools, TOOLS)
        raise ConfigError(f"tools={tools}: expected one of {', '.join(TOOLS)}{hint}")
    step = typed.step(REPLAY)
    with hydra_session(Source()):
        config = replayed(typed.folder, Source()).config
    try:
        if (typed.folder / "crash.json").is_file() and not typed.words:
            from agenttrain.replay_crash import replay_crash  # torch comes with it

            return replay_crash(config, typed.folder)
        from agenttrain.recorded import written_steps
        from agenttrain.replay import replay_rollouts

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


def rescore(arguments: Sequence[str]) -> int:
    """`rescore <run folder> …`: print both means, and perhaps write every rollout's."""
    typed = parse_folder(arguments, ("step", "to"), RESCORE)
    if not any(text.startswith("reward") for text in typed.overrides):
        raise ConfigError(f"by which reward? {RESCORE}")
    step, to = typed.step(RESCORE), typed.words.get("to")
    with hydra_session(Source()):
        config = rescored(typed.folder, open_keys(typed.overrides), Source()).config
    validate(config)
    if to is not None and Path(to).exists():
        raise ConfigError(f"to={to}: is there already; name another file")
    try:
        from agenttrain.rescore import rescore as rescored_rows

        return rescored_rows(config, typed.folder, step=step, to=Path(to) if to else None)
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def view(arguments: Sequence[str]) -> int:
    """`view <run folder> [step=N]`: write the page beside the rollouts and say where."""
    folders = [Path(word) for word in arguments if not word.startswith("step=")]
    steps = [word.removeprefix("step=") for word in arguments if word.startswith("step=")]
    if len(folders) != 1 or len(steps) > 1 or not all(step.isdecimal() for step in steps):
        raise ConfigError("view: give a run folder and perhaps a step: view <run folder> [step=N]")
    with hydra_session(Source()):
        composed = viewed(folders[0], Source())
    written = sorted((folders[0] / "rollouts").glob("step-*.jsonl"))
    if not written:
        raise ConfigError(f"view {folders[0]}: the run has written no rollouts (tracker.rollouts)")
    numbers = [int(path.stem.removeprefix("step-")) for path in written]
    step = int(steps[0]) if steps else numbers[-1]
    if step not in numbers:
        known = f"there are {numbers[0]} to {numbers[-1]}"
        raise ConfigError(f"view step={step}: no rollouts of that step; {known}")
    from agenttrain.launch import write_page

    print(write_page(composed.config, folders[0], step))
    return 0
