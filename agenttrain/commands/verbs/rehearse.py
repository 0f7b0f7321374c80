"""`agenttrain rehearse`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, add_json, positive, whole

ROLLOUTS = 64


def add_arguments(parser: ArgumentParser) -> None:
    """Add the number of rollouts and the engine's speed."""
    parser.add_argument(
        "--rollouts",
        type=whole(1),
        default=ROLLOUTS,
        metavar="N",
        help=f"rollouts to make ({ROLLOUTS})",
    )
    parser.add_argument(
        "--tokens-per-s",
        type=positive,
        metavar="N",
        help="sampling speed by which the seconds of a step are computed",
    )
    add_json(parser)


def run(args: Namespace, overrides: list[str]) -> int:
    """Make rollouts with a stub in the place of the model."""
    from agenttrain.commands.check import check_files
    from agenttrain.commands.running import compose_single

    composed = compose_single("train", args, overrides)
    check_files([composed])
    from agenttrain.commands.rehearse.command import RehearseOptions, rehearse

    options = RehearseOptions(
        rollouts=args.rollouts, tokens_per_s=args.tokens_per_s, file=args.json, settings=overrides
    )
    return rehearse(composed.config, options)


VERB = Verb(
    name="rehearse",
    help="the run's tools, environments and rewards, tried by a stub instead of a model",
    page="start/rehearse.md",
    examples={
        "rehearse": "the bundled agent",
        "rehearse experiment=calculator --rollouts 16 --tokens-per-s 2000": "a step's cost too",
    },
    add_arguments=add_arguments,
    run=run,
    settings={**SAVED},
)
