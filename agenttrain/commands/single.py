"""Verbs about one run: settings are composed and checked before anything heavy is imported."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

from agenttrain.commands.check import check_files
from agenttrain.commands.running import compose_all
from agenttrain.settings.checks import engine_of_play
from agenttrain.settings.command_line import command_of
from agenttrain.settings.compose import Composed, hydra_session
from agenttrain.settings.engine_checks import admit_engine, typed_engine
from agenttrain.settings.saved import at_step, run_of
from agenttrain.types import ConfigError, ToolCall
from agenttrain.utils.sections import raise_config_error


def compose_single(verb: str, args: Namespace, overrides: Sequence[str]) -> Composed:
    """Compose and check the settings of a verb about one run. Raises ConfigError."""
    if args.multirun:
        raise ConfigError(f"-m: agenttrain {args.verb} is about one run; leave -m out")
    command = command_of(verb, args, overrides)
    with hydra_session(command.source):
        (composed,) = compose_all(command)
    return composed


def data(args: Namespace, overrides: Sequence[str]) -> int:
    """Print the rows as the model will see them."""
    config = compose_single("data", args, overrides).config
    from agenttrain.commands.data import show  # imports torch

    return show(config, args.rows)


def images(args: Namespace, overrides: Sequence[str]) -> int:
    """List the images that the rows need, and build them; return exit code 1 if one is missing."""
    config = compose_single("data", args, overrides).config
    from agenttrain.commands.images import show  # imports torch

    return show(config, args)


def tools(args: Namespace, overrides: Sequence[str]) -> int:
    """Print the model's tools, or call them; return exit code 1 if a call has an error."""
    calls = [_read_call(name, text, number) for number, (name, text) in enumerate(args.call)]
    config = compose_single("tools", args, overrides).config
    from agenttrain.commands.tools import show  # imports torch

    return show(config, args, calls, overrides)


def plan(args: Namespace, overrides: Sequence[str]) -> int:
    """Print the memory per GPU; return exit code 1 if the run does not fit."""
    from agenttrain.commands.plan.command import announced_if_slow, plan_options, show

    options = plan_options(args)
    composed = compose_single("plan", args, overrides)
    admit_engine(composed, "plan")
    with announced_if_slow(composed.config.model.path):
        return show(composed.config, options)


def rehearse(args: Namespace, overrides: Sequence[str]) -> int:
    """Make rollouts with a stub in the place of the model."""
    composed = compose_single("train", args, overrides)
    check_files([composed])
    from agenttrain.commands.rehearse.command import rehearse  # imports torch

    return rehearse(composed.config, args, overrides)


def play(args: Namespace, overrides: Sequence[str]) -> int:
    """Talk to an agent."""
    # `--step 0` has no checkpoint: `talk` reads it from `args` too, and lets the model before
    # training answer beside the newest checkpoint, to compare them.
    checkpoint_step = None if args.step == "0" else args.step
    # The run folder (None without `run=`), and overrides that name its checkpoint. `typed` is the
    # step for error messages.
    folder, words = at_step(overrides, checkpoint_step, typed=args.step)
    composed = compose_single("play", args, words)
    # Imports an engine from outside the package, and checks its keys.
    admit_engine(composed, "play")
    raise_config_error(engine_of_play(composed.config, "play", words))
    from agenttrain.commands.play import play as talk  # imports torch

    return talk(composed.config, args, folder)


def serve(args: Namespace, overrides: Sequence[str]) -> int:
    """Answer chat requests."""
    # The run folder, None for a model that is given by its settings, and the overrides for it.
    folder, words = at_step(overrides, args.step)
    composed = compose_single("serve", args, words)
    admit_engine(composed, "serve")
    from agenttrain.commands.serve import serve

    if not args.name:
        args.name = "agent" if folder is None else run_of(folder).resolve().name
    return serve(composed.config, args, engine_named=typed_engine(words) is not None)


def _read_call(name: str, text: str, number: int) -> ToolCall:
    """Return the call of `--call NAME JSON`; raises ConfigError for text that is no JSON object."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--call {name} {text}: is not JSON: {error}; quote it for the shell, e.g. --call "
            f"{name} '{{\"a\": 1}}'"
        ) from error
    if not isinstance(arguments, dict):
        problem = "must be an object of arguments, e.g. {}"
        raise ConfigError(f"--call {name} {text}: {problem}")
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments)
