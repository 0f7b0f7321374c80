"""`agenttrain submit`: a run, or with -m a sweep, as a job of SLURM's."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, one_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb that the job runs, and the options."""
    parser.add_argument(
        "target",
        nargs="?",
        default="train",
        type=one_of("train", "sft"),
        metavar="VERB",
        help="train, or sft: they can be resumed",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job's script and submit nothing"
    )
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="leave out the check of tools, template and data on this machine",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Submit a run or a sweep."""
    from agenttrain.commands.slurm.submit import submit

    return submit(args, overrides)


VERB = Verb(
    name="submit",
    help="a run, or with -m a sweep, as a job of SLURM's",
    page="guides/slurm.md",
    examples={
        "submit --dry-run slurm=gpu slurm.time=08:00:00": "the script, without a job",
        "submit -m seed=0,1,2": "a sweep as an array of jobs",
    },
    add_arguments=add_arguments,
    run=run,
    settings={
        **SAVED,
        "hydra.run.dir=FOLDER": "name the run folder (outputs/<experiment>/<date>_<time>)",
    },
)
