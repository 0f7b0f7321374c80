"""`agenttrain plan`: memory per GPU, from the model's config.json."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, add_json, positive, whole

PROMPT = 1024


def add_arguments(parser: ArgumentParser) -> None:
    """Add the planned machine and the measured speeds."""
    add = parser.add_argument
    for name, text in (
        ("--gpu-memory-gb", "memory of one GPU (that of this machine's)"),
        ("--host-memory-gb", "memory of the machine"),
        ("--server-tokens-per-s", "measured speed of a server"),
        ("--trainer-tokens-per-s", "measured speed of a training GPU"),
    ):
        add(name, type=positive, metavar="N", help=text)
    add("--devices", type=whole(1), metavar="N", help="number of GPUs")
    text = f"length of a prompt ({PROMPT})"
    add("--prompt-tokens", type=whole(1), default=PROMPT, metavar="N", help=text)
    add("--cpu", action="store_true", help="plan for the processor alone")
    add_json(parser)


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the memory per GPU; return exit code 1 if the run does not fit."""
    from agenttrain.commands.plan.command import planned, show
    from agenttrain.commands.running import compose_single
    from agenttrain.settings.engine_checks import admit_engine

    options = planned(args)
    composed = compose_single("plan", args, overrides)
    admit_engine(composed)
    return show(composed.config, options)


VERB = Verb(
    name="plan",
    help="memory per GPU, from the model's config.json",
    page="guides/memory-plan.md",
    examples={
        "plan --gpu-memory-gb 80 model.path=my_model": "does it fit?",
        "plan --gpu-memory-gb 80 --devices 8 distributed=fsdp2": "on eight GPUs",
    },
    add_arguments=add_arguments,
    run=run,
    settings={**SAVED},
)
