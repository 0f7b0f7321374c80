"""`agenttrain train`: train an agent (when no verb is given)."""

from __future__ import annotations

from argparse import Namespace

from agenttrain.commands.verb import SAVED, Verb


def run(args: Namespace, overrides: list[str]) -> int:
    """Start the run, or the runs of a sweep."""
    from agenttrain.commands.running import run_verb

    return run_verb("train", args, overrides)


VERB = Verb(
    name="train",
    help="train an agent (when no verb is given)",
    page="start/first-run.md",
    examples={
        "train algorithm=rloo optimizer.lr=1e-4": "the bundled agent with other settings",
        "train resume=outputs/shop/<run> steps=200": "go on with a run, and further",
    },
    run=run,
    settings={
        **SAVED,
        "hydra.run.dir=FOLDER": "name the run folder (outputs/<experiment>/<date>_<time>)",
    },
    shows=True,
)
