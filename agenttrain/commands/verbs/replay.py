"""`agenttrain replay`: rollouts once more from what was recorded: the same ids?."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, one_of, whole


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the step, the rollout and the tools."""
    add_folder(parser, text="the run's folder, or that of a crash")
    add = parser.add_argument
    add("--step", type=whole(), metavar="N", help="the step (the last one)")
    add("--rollout", metavar="ID", help="one rollout of it (all)")
    add(
        "--tools",
        type=one_of("recorded", "live"),
        default="recorded",
        metavar="recorded|live",
        help="live: run the tools again instead of reading their recorded replies",
    )
    add(
        "--trust",
        type=one_of("true", "false"),
        default="false",
        metavar="true",
        help="let the code run that the folder's config.yaml names",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Repeat rollouts or a crash; return exit code 1 where something differs."""
    from agenttrain.commands.records import replay

    return replay(args)


VERB = Verb(
    name="replay",
    help="rollouts once more from what was recorded: the same ids?",
    page="operate/replay.md",
    examples={
        "replay outputs/shop/<run> --step 10": "the rollouts of a step",
        "replay outputs/shop/<run>/crash/step-000012": "a crash, to see what failed",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
