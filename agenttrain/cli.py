"""The `agenttrain` command: verbs, overrides, and what can be refused before anything heavy.

A command is composed and checked first, so that a mistake costs a second and leaves no folder;
then Hydra takes over, makes the run folder (or those of a sweep) and calls `_launch`. Nothing here
imports torch before that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from agenttrain.commands.arguments import help_text
from agenttrain.commands.check import certify_files, check, check_files
from agenttrain.commands.records import replay, rescore, view
from agenttrain.commands.settings import settings
from agenttrain.commands.slurm.submit import submit
from agenttrain.commands.sweep import command as cli_sweep
from agenttrain.commands.sweep.compare import compare
from agenttrain.commands.sweep.expand import expand
from agenttrain.commands.sweep.process import end_with_sweep
from agenttrain.commands.sweep.record import is_job
from agenttrain.launch.processes import (
    assigned_folder,
    check_processes,
    count_gpus,
    is_later_node,
    started_by_others,
)
from agenttrain.launch.start import as_rank, start
from agenttrain.launch.worker import leave
from agenttrain.settings.checks import (
    check_init,
    check_own_objective,
    check_structured,
    check_test_rows,
    check_verb,
    validate,
)
from agenttrain.settings.command_line import (
    RUN_DIR,
    TIMESTAMP,
    Command,
    named_folder,
    parse,
    resuming,
    split_verb,
)
from agenttrain.settings.compose import (
    HYDRA_VERSION,
    Composed,
    check_writable,
    compose_raw,
    compose_run,
    convert,
    hydra_session,
    open_keys,
    register,
)
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.settings.machine import CHECK, SAMPLING_VERBS, Machine, machine_problems
from agenttrain.settings.saved import (
    check_new,
    evaluated,
    finished_steps,
    resumed,
    resumed_as_begun,
    run_of,
)
from agenttrain.settings.trust import ENGINE, SECTIONS
from agenttrain.tools.config import without_password
from agenttrain.training.config import Schedule
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED
from agenttrain.utils.files import conf_folder
from agenttrain.utils.model_path import PARTS, SIZES
from agenttrain.utils.output import lost_output, protect

RUNNING_VERBS = ("train", "sft", "eval")
"""Those whose runs a sweep may have."""
SHORT_ANSWERS = {"--help", "-h", "--version"}
"""Options that print and run nothing, whatever the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code (`utils/exit_codes.py`)."""
    protect()
    end_with_sweep()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # As `python -m` does, so that `_target_: my_tools.find` works beside one's own files; last, so
    # that no file there hides an installed package.
    sys.path.append(os.getcwd())
    # A run's results are in its folder; another verb's are what it prints.
    prints = SHORT_ANSWERS & set(arguments) or split_verb(arguments)[0] not in RUNNING_VERBS
    if started_by_others() and prints and os.environ["RANK"] != "0":
        return DONE
    code = _do(arguments)
    if started_by_others() and not prints:
        leave(code)
    if lost := lost_output():
        print(f"agenttrain: {lost}", file=sys.stderr)
        if code == DONE and prints:
            return FAILED
    return code


def _do(arguments: list[str]) -> int:
    verb, rest = split_verb(arguments)
    if verb == "templates":
        return _templates(rest)
    if {"--help", "-h"} & set(arguments):
        print(help_text())
        return 0
    if "--version" in arguments:
        print(f"agenttrain {version('agenttrain')}")
        return 0
    try:
        own = {
            "settings": settings,
            "view": view,
            "tools": _tools,
            "data": _data,
            "export": _export,
            "replay": replay,
            "rescore": rescore,
            "compare": compare,
            "submit": _submit,
            "plan": _plan,
        }.get(verb)
        if own is not None:
            return own(rest)
        if started_by_others() and verb in RUNNING_VERBS:
            return as_rank(lambda: run(arguments), verb)
        return run(arguments)
    except ConfigError as error:
        for line in without_password(str(error)).splitlines():
            print(f"agenttrain: {line}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def run(arguments: Sequence[str]) -> int:
    """Run the verb of a command line that composes settings; return the exit code.

    Raises ConfigError. It is what each worker of a run calls.
    """
    command = parse(arguments)
    if command.shows is not None:
        return _show(command)
    with hydra_session(command.source):
        if command.sweep and command.saved is not None:
            return cli_sweep.go_on(command, _compose_one)
        runs = compose_all(command)
        check_files(runs)
        check_processes(command, runs)
        if command.verb in SAMPLING_VERBS:
            for run in runs:
                admit_engine(run)
        configs = [run.config for run in runs]
        problems = machine_problems(command.verb, configs, Machine(count_gpus))
        if problems and command.verb != CHECK:
            raise ConfigError("\n".join(problems))
        if command.sweep and command.verb != CHECK:
            return cli_sweep.start(command, runs)
    if command.verb == CHECK:
        return _check(command, runs, problems)
    folder = assigned_folder()
    if folder is not None:
        return _start(command, runs[0], folder)
    if command.saved is not None:
        return _go_on(command, command.saved, runs[0])
    if is_later_node(runs[0].config.distributed):
        return _start(command, runs[0], Path())
    return _hand_over(command)


def _check(command: Command, runs: Sequence[Composed], problems: list[str]) -> int:
    """Check what a run is made of, and raise everything that a run would be refused for here."""
    problems = [*problems, *_taken_folder(command)]
    try:
        code = check(command, runs)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *problems])) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return code


def _taken_folder(command: Command) -> Iterator[str]:
    """The refusal of a new run in a folder that holds one."""
    folder = None if command.saved or command.sweep else named_folder(command.overrides)
    if folder is not None and _holds_run(folder):
        yield str(_taken(folder))


def _show(command: Command) -> int:
    """Let Hydra print; a configuration that does not compose is told in our words first."""
    if command.shows != "other":
        with hydra_session(command.source):
            compose_raw(command.overrides, command.source)
    return _hand_over(command)


def compose_all(command: Command) -> list[Composed]:
    """The checked settings of every run; raises ConfigError. Needs a `hydra_session`."""
    overrides, source = command.overrides, command.source
    if command.saved is not None:
        composed = _load(command, command.saved)
        # A plan runs no code of the run's, so that nobody was asked for trust in it.
        validate(composed.config, code=() if command.verb == "plan" else SECTIONS)
        check_verb(command.verb, overrides)
        check_test_rows(command.verb, composed.config)
        check_structured(command.verb, composed.config)
        check_own_objective(command.verb, composed.config)
        return [composed]
    if not command.sweep:
        return [_compose_one(overrides, command)]
    runs = []
    for combination in expand(overrides, source).runs:
        try:
            runs.append(_compose_one(combination, command))
        except ConfigError as error:
            raise ConfigError(f"in the run {' '.join(combination)}\n{error}") from error
    if command.verb in RUNNING_VERBS:
        cli_sweep.check_objective(command.verb, runs)
    return runs


def _load(command: Command, saved: Path) -> Composed:
    if command.auto:
        return resumed_as_begun(saved, open_keys(command.overrides), command.source)
    changes = [text for text in command.overrides if not _names_eval_folder(text, command)]
    if command.verb == "eval":
        return evaluated(saved, open_keys(changes), command.source, trust=command.trust)
    runs = (ENGINE,) if command.verb == "plan" else SECTIONS
    return resumed(saved, open_keys(changes), command.source, trust=command.trust, runs=runs)


def _compose_one(overrides: Sequence[str], command: Command) -> Composed:
    if not command.sweep:
        cli_sweep.refuse_without_m(overrides)
    composed = compose_run(overrides, command.source)
    check_new(composed.config)
    validate(composed.config, SIZES if command.verb == "plan" else tuple(PARTS))
    check_verb(command.verb, overrides)
    check_init(command.verb, composed.config)
    check_test_rows(command.verb, composed.config)
    check_structured(command.verb, composed.config)
    check_own_objective(command.verb, composed.config)
    return composed


def _names_eval_folder(text: str, command: Command) -> bool:
    return command.verb == "eval" and text.startswith(RUN_DIR)


def _go_on(command: Command, saved: Path, composed: Composed) -> int:
    """Resume or evaluate a run; Hydra would make a folder of its own and is left out."""
    if command.verb != "eval":
        done = finished_steps(saved)
        if done is not None and done >= composed.config.steps:
            print(_finished(command.verb, saved, done, composed))
            return 0
        remedy = "make it writable, or copy the run and resume the copy"
        check_writable(saved, f"resume={saved}", remedy)
        return _launch(command, composed, saved)
    run = run_of(saved)
    named = [t.removeprefix(RUN_DIR) for t in command.overrides if _names_eval_folder(t, command)]
    default = run.parent / f"{datetime.now():{TIMESTAMP}}_eval"
    folder = Path(named[-1]) if named else default
    if _holds_run(folder):
        raise _taken(folder)
    check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
    return _launch(command, composed, folder)


def _finished(verb: str, saved: Path, done: int, composed: Composed) -> str:
    text = (
        f"{saved}: finished after {done} steps; for more of them: "
        f"agenttrain {resuming(verb)}resume={quote(str(saved))} steps={2 * done}"
    )
    schedule = composed.config.optimizer.schedule
    if schedule is not Schedule.constant:
        text += (
            f"\n(optimizer.schedule={schedule} ended at a learning rate near 0; over more steps "
            "it jumps back up)"
        )
    return text


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def _taken(folder: Path) -> ConfigError:
    return ConfigError(
        f"{RUN_DIR}{folder}: holds a run already; resume={quote(str(folder))} goes on with it, "
        "another name starts a new one"
    )


def _hand_over(command: Command) -> int:
    """Let Hydra make the folder and call back for the run, or print."""
    codes: list[int] = []
    refused: list[ConfigError] = []
    begun: list[bool] = []

    def job(raw: DictConfig) -> None:
        begun.append(True)
        folder = Path(HydraConfig.get().runtime.output_dir)
        composed = convert(raw)
        if _holds_run(folder) and command.auto:  # another node has begun it meanwhile
            composed.config.resume = str(folder)
        try:
            if _holds_run(folder) and composed.config.resume is None:
                raise _taken(folder)
            check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
            codes.append(_launch(command, composed, folder))
        except ConfigError as error:
            refused.append(error)  # raised after Hydra, which would announce an error of its own

    register()
    # Errors in the configuration have been told; what Hydra meets from here on is a bug, and its
    # shortened traceback would hide where.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # Options last: `--info` would take an override behind it for its argument.
    sys.argv = ["agenttrain", *command.overrides, *command.options]
    main = hydra.main(
        version_base=HYDRA_VERSION, config_path=str(conf_folder()), config_name=command.source.name
    )
    try:
        main(job)()
    except KeyboardInterrupt:
        return codes[-1] if codes else INTERRUPTED
    except OSError as error:
        if begun:
            raise
        raise ConfigError(
            f"{RUN_DIR}{error.filename}: the run's folder cannot be made: {error.strerror}; name "
            f"another one: {RUN_DIR}…"
        ) from error
    if refused:
        raise refused[0]
    return max(codes, default=0)


def _only(command: Command, one: str) -> Composed:
    """The settings of a command that is about one run."""
    if command.sweep:
        raise ConfigError(f"{one}; leave -m out")
    with hydra_session(command.source):
        (composed,) = compose_all(command)
    return composed


def _data(arguments: Sequence[str]) -> int:
    """`data [--rows N] [overrides]`: the rows as the model will see them."""
    from agenttrain.commands import data as show_data

    options, overrides = show_data.parse(arguments)
    composed = _only(parse(overrides), "data -m: shows the rows of one run")
    return show_data.show(composed.config, options)


def _submit(arguments: Sequence[str]) -> int:
    """`submit [--dry-run] [--no-check] [overrides]`: the run as a job of SLURM's."""
    return submit(arguments, compose_all, certify_files)


def _plan(arguments: Sequence[str]) -> int:
    """`plan [--gpu-memory-gb 80] [--devices 8] [overrides]`: memory per GPU, from config.json."""
    from agenttrain.commands.plan import command as planning

    options, overrides = planning.parse(arguments)
    composed = _only(parse(["plan", *overrides]), "plan -m: plans one run")
    admit_engine(composed)
    return planning.show(composed.config, options)


def _tools(arguments: Sequence[str]) -> int:
    """`tools [--row N] [--task ID] [--call NAME JSON] [--json] [overrides]`: what the model can
    call, and a try."""
    from agenttrain.commands import tools as show_tools

    options, overrides = show_tools.parse(arguments)
    composed = _only(parse(overrides), "tools -m: shows the tools of one run")
    return show_tools.show(composed.config, options)


def _templates(arguments: Sequence[str]) -> int:
    from agenttrain.commands.templates import main  # tokenizers come with it

    return main(arguments)


def _export(arguments: Sequence[str]) -> int:
    from agenttrain.commands.export import main

    return main(arguments)


def _launch(command: Command, composed: Composed, folder: Path) -> int:
    print(f"{command.verb} in {folder}", flush=True)
    return _start(command, composed, folder)


def _start(command: Command, composed: Composed, folder: Path) -> int:
    sweep = command.saved is None and is_job(folder)
    return start(command, composed, folder, program="agenttrain.cli", sweep=sweep)


if __name__ == "__main__":
    sys.exit(main())
