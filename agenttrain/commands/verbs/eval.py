"""`agenttrain eval`: roll out without updates: reward, pass@k and intervals."""

from __future__ import annotations

from argparse import Namespace

from agenttrain.commands.verb import Verb


def run(args: Namespace, overrides: list[str]) -> int:
    """Start the evaluation, or those of a sweep."""
    from agenttrain.commands.running import run_verb

    return run_verb("eval", args, overrides)


VERB = Verb(
    name="eval",
    help="roll out without updates: reward, pass@k and intervals",
    page="guides/evaluation.md",
    examples={
        "eval run=outputs/shop/<run> eval.samples=4": "four answers to each test question",
        "eval eval.questions=20 eval.greedy=true": "the bundled agent before training",
    },
    run=run,
    settings={
        "run=FOLDER": "the agent of this run, from its newest checkpoint; or one checkpoint",
        "model.path=FOLDER": "a model without a run",
        "trust=true": "let the code run that the folder's config.yaml names",
        "hydra.run.dir=FOLDER": "name the folder of the evaluation (beside the run)",
    },
    shows=True,
)
