"""`agenttrain play`: talk to an agent in the terminal, with its tools."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, whole


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint and the row."""
    parser.add_argument(
        "--step",
        metavar="N",
        help="a checkpoint's step, or best; 0: the model before training answers too",
    )
    parser.add_argument(
        "--row",
        type=whole(),
        default=0,
        metavar="N",
        help="the row of data.test that the conversation is about (0)",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Talk to an agent."""
    from agenttrain.commands.running import compose_single
    from agenttrain.settings.engine_checks import admit_engine
    from agenttrain.settings.saved import at_step

    folder, words = at_step(overrides, None if args.step == "0" else args.step, args.step)
    composed = compose_single("play", args, words)
    admit_engine(composed)
    from agenttrain.commands.play import PlayOptions, check_engine, play

    check_engine(composed.config, words)
    options = PlayOptions(folder=folder, before=args.step == "0", row=args.row)
    return play(composed.config, options)


VERB = Verb(
    name="play",
    help="talk to an agent in the terminal, with its tools",
    page="guides/use.md",
    examples={
        "play run=outputs/shop/<run> --step 0": "the agent beside the model before training",
        "play model=shop eval.temperature=0": "a model without a run, greedily",
    },
    add_arguments=add_arguments,
    run=run,
    settings={
        "run=FOLDER": "the agent of a run, or of one of its checkpoints; or model.path=…",
        "trust=true": "let the code run that the folder's config.yaml names",
    },
)
