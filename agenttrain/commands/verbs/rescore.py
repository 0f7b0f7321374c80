"""`agenttrain rescore`: stored rollouts by another reward, beside the old one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, add_new_file, whole


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the step and the file."""
    add_folder(parser)
    parser.add_argument("--step", type=whole(), metavar="N", help="the step (all)")
    add_new_file(parser, "write every rollout's rewards")


def run(args: Namespace, overrides: list[str]) -> int:
    """Print both means, and write every rollout's with `--to`."""
    from agenttrain.commands.records import rescore

    return rescore(args, overrides)


VERB = Verb(
    name="rescore",
    help="stored rollouts by another reward, beside the old one",
    page="operate/replay.md",
    examples={
        "rescore outputs/shop/<run> reward=[numeric_close]": "as good by another one?",
        "rescore outputs/shop/<run> --step 10 reward=[contains] --to scores.jsonl": "one step",
    },
    add_arguments=add_arguments,
    run=run,
    settings={
        "reward=[…]": "the other reward",
        "trust=true": "let the code run that the folder's config.yaml names",
    },
)
