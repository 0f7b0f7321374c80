"""The `agenttrain` command: find the verb, run it, and answer for its errors.

Nothing heavy is imported here, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from agenttrain.commands.verbs import RUNNING, parse, split_verb, typed_verb
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED
from agenttrain.utils.garbage import exit_without_collection, no_garbage_collection
from agenttrain.utils.output import lost_output, protect
from agenttrain.utils.redaction import hide_secrets

SHORT_ANSWERS = {"--help", "-h", "--version"}
"""Options that print and run nothing, whatever the verb."""
SWEEP_PROCESS = "AGENTTRAIN_SWEEP_PROCESS"
"""Environment of a sweep's job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code (`utils/exit_codes.py`)."""
    protect()  # stdout and stderr, against a closed descriptor or a broken pipe
    exit_without_collection()  # the operating system frees what is alive at the exit
    if SWEEP_PROCESS in os.environ:
        from agenttrain.commands.sweep.process import end_with_sweep

        end_with_sweep()  # a sweep started this process, which must not outlive it
    arguments = list(sys.argv[1:] if argv is None else argv)
    # As with `python -m`, `_target_: my_tools.find` finds the user's modules in the current folder.
    # It comes last, so that no file there hides an installed package.
    sys.path.append(os.getcwd())
    # The results of a run are in its folder. All other commands, and help, only print.
    verb = split_verb(arguments)[0]
    starts_run = verb in RUNNING and not SHORT_ANSWERS & set(arguments)
    is_rank = _is_rank()
    if is_rank and not starts_run and os.environ["RANK"] != "0":
        return DONE  # the first process prints for all
    shares_run = is_rank and starts_run
    code = _answer(arguments, shares=shares_run)
    if shares_run:
        from agenttrain.launch.worker import leave

        # Ends the process here: after a peer's crash, torch may abort an ordinary exit.
        leave(code)
    if lost := lost_output():
        print(f"agenttrain: {lost}", file=sys.stderr)
        if code == DONE and not starts_run:  # what was to be printed is the whole result
            return FAILED
    return code


def _is_rank() -> bool:
    """Return True if torchrun or a similar program started this process as one of several."""
    if "RANK" not in os.environ:  # the import takes half a second
        return False
    from agenttrain.launch.processes import started_by_others

    return started_by_others()


def _answer(arguments: list[str], *, shares: bool) -> int:
    """Print what is asked for, or run the verb; print the errors that it raises.

    `shares`: this process is one of several that share a run.
    """
    try:
        if {"--help", "-h"} & set(arguments):
            from agenttrain.commands.help import help_text, verb_help

            typed = typed_verb(arguments)
            print(help_text() if typed is None else verb_help(typed))
            return DONE
        if "--version" in arguments:
            from importlib.metadata import version

            print(f"agenttrain {version('agenttrain')}")
            return DONE
        if shares:
            from agenttrain.launch.start import as_rank

            return as_rank(lambda: run(arguments), split_verb(arguments)[0])
        return run(arguments)
    except ConfigError as error:
        for line in hide_secrets(str(error)).splitlines():
            print(f"agenttrain: {line}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def run(arguments: Sequence[str]) -> int:
    """Run the verb of a command line; return the exit code. Raises ConfigError.

    Each worker of a run calls it with the launcher's command line.
    """
    verb, args, settings = parse(arguments)
    if verb.settings is not None:
        # `verb.run` imports Hydra and the settings with its own module. They are imported here
        # first, without garbage collection: it would visit again and again what lives to the end.
        with no_garbage_collection():
            import agenttrain.commands.running  # noqa: F401  not used here
    return verb.run(args, settings)


if __name__ == "__main__":
    sys.exit(main())
