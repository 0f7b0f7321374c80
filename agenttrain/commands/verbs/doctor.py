"""`agenttrain doctor`: what this machine can do, and what is missing."""

from __future__ import annotations

from argparse import Namespace

from agenttrain.commands.verb import Verb, add_json


def run(args: Namespace, overrides: list[str]) -> int:
    """Examine the machine; return exit code 1 if the default command cannot run."""
    from agenttrain.commands.doctor import doctor

    return doctor(args.json)


VERB = Verb(
    name="doctor",
    help="what this machine can do, and what is missing",
    page="start/install.md",
    examples={
        "doctor": "versions, GPUs, sandbox, SLURM, hub",
        "doctor --json doctor.json": "for a bug report",
    },
    add_arguments=add_json,
    run=run,
    settings=None,
)
