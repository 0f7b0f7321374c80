"""`agenttrain check`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, one_of

RUNS = ("train", "sft", "eval", "play", "serve")
"""Verbs that have settings of their own."""
LIKE_TRAIN = ("submit", "rehearse", "plan", "data", "tools")
"""Verbs that take the settings of a run, whichever verb will start it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb whose settings are checked."""
    parser.add_argument(
        "target",
        nargs="?",
        type=one_of(*RUNS, *LIKE_TRAIN),
        metavar="VERB",
        help="the verb whose settings these are: sft, eval run=…",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Check the runs; return exit code 1 if a certificate did not pass."""
    from agenttrain.commands.running import run_verb
    from agenttrain.settings.command_line import CHECK

    verb = args.target if args.target in RUNS else CHECK
    return run_verb(verb, args, overrides, checks=True)


VERB = Verb(
    name="check",
    help="compose, check and count; makes no folder and runs no program but an outside agent",
    page="start/your-agent.md",
    examples={
        "check algorithm.group_size=16": "what a step of that run would be",
        "check sft experiment=shop_warmstart": "the same for supervised learning",
        "check -m algorithm=grpo,rloo seed=0,1": "the runs of a sweep",
    },
    add_arguments=add_arguments,
    run=run,
    settings={**SAVED, "run=FOLDER": "with eval, play and serve: the saved run"},
    shows=True,
)
