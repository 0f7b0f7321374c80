"""`agenttrain data`: the rows as the model will see them, with their tokens."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, whole

SHOWN = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add the number of prompts."""
    parser.add_argument(
        "--rows", type=whole(), default=SHOWN, metavar="N", help=f"prompts to print ({SHOWN})"
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the rows as the model will see them."""
    from agenttrain.commands.running import compose_single

    composed = compose_single("data", args, overrides)
    from agenttrain.commands.data import show  # imports torch

    return show(composed.config, args.rows)


VERB = Verb(
    name="data",
    help="the rows as the model will see them, with their tokens",
    page="guides/datasets.md",
    examples={
        "data --rows 5": "five prompts of the bundled agent",
        "data data=file data.path=rows.jsonl data.test_fraction=0.1": "those of your own rows",
    },
    add_arguments=add_arguments,
    run=run,
    settings={**SAVED},
)
