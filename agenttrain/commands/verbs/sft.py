"""`agenttrain sft`: imitate conversations with tool calls: the warm start of an agent."""

from __future__ import annotations

from argparse import Namespace

from agenttrain.commands.verb import SAVED, Verb


def run(args: Namespace, overrides: list[str]) -> int:
    """Start the run, or the runs of a sweep."""
    from agenttrain.commands.running import run_verb

    return run_verb("sft", args, overrides)


VERB = Verb(
    name="sft",
    help="imitate conversations with tool calls: the warm start of an agent",
    page="guides/warm-start.md",
    examples={
        "sft experiment=shop_warmstart": "rebuild the bundled agent from demonstrations",
        "sft experiment=calculator_warmstart steps=50": "the calculator's, a short one",
    },
    run=run,
    settings={
        **SAVED,
        "hydra.run.dir=FOLDER": "name the run folder (outputs/<experiment>/<date>_<time>)",
    },
    shows=True,
)
