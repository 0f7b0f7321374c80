"""Compose, check and start the runs of `train`, `sft` and `eval`; `check` stops before the start.

Settings are composed and checked before anything heavy is imported, so that a mistake costs a
second and leaves no folder.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shlex import quote

from omegaconf import Container, OmegaConf

from agenttrain.commands.verb import call_command
from agenttrain.commands.verbs import DECLARED, LIKE_TRAIN, RUNNING
from agenttrain.settings.command_line import (
    CHECK,
    RUN_DIR,
    TIMESTAMP,
    Command,
    command_of,
    named_folder,
    resuming,
)
from agenttrain.settings.compose import (
    Composed,
    check_writable,
    compose_new,
    compose_raw,
    hydra_session,
    in_run_folder,
    open_keys,
    print_info,
)
from agenttrain.settings.overrides import as_typed, key_of
from agenttrain.types import ConfigError
from agenttrain.utils.garbage import no_garbage_collection
from agenttrain.utils.model_path import PARTS, SIZES
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.sections import raise_config_error

SWEPT = (*RUNNING, CHECK)
WITH_FOLDER = ("rescore", "engine-server")
"""Verbs whose folder `agenttrain check` takes as they do."""


def run_verb(args: Namespace, overrides: Sequence[str]) -> int:
    """Start the runs of `train`, `sft` and `eval`; return the exit code. Raises ConfigError."""
    command = command_of(args.verb, args, overrides)
    return _show(command, args) if args.cfg or args.info or args.hydra_help else run(command)


def check_verb_settings(args: Namespace, overrides: Sequence[str]) -> int:
    """Check the settings of a verb; exit code 1: a certificate did not pass. Raises ConfigError."""
    verb = CHECK if args.target in (None, *LIKE_TRAIN) else args.target
    if args.folder is not None and verb not in WITH_FOLDER:
        raise ConfigError(
            f"{args.folder}: settings are written key=value; see agenttrain check --help"
        )
    shows = args.cfg or args.info or args.hydra_help
    check = None if args.target is None else DECLARED[args.target].check
    if check is not None and not shows:
        return call_command(check, args, overrides)
    command = command_of(verb, args, overrides, checks=True)
    return _show(command, args) if shows else _check(command)


def run(command: Command) -> int:
    """Check the runs of a command and start them; return the exit code. Raises ConfigError.

    The command is a sweep, new or resumed, or a single run: a new one, a saved one that is resumed
    or evaluated (`command.saved`), or one that another process has begun, which this one joins.
    """
    with hydra_session(command.source):
        if command.sweep and command.saved is not None:
            from agenttrain.commands.sweep.command import resume

            return resume(command, _compose_one)
        runs = compose_all(command)
        raise_config_error(_machine_problems(command, runs))
        from agenttrain.launch.processes import assigned_folder, is_later_node

        if command.sweep:
            return _start_sweep(command, runs)
        composed = runs[0]
        # A process that a launcher started as a rank has the launcher's folder.
        folder_of_launcher = assigned_folder()
        joins_run = folder_of_launcher is not None or is_later_node(composed.config.distributed)
        if command.saved is None and not joins_run:
            return _start_new(command, composed)  # Hydra makes the folder, in its session
    if command.saved is not None and folder_of_launcher is None:
        return _continue_run(command, command.saved, composed)
    # A later node has no folder yet: the first rank sends it the name.
    return _launch(command, composed, folder_of_launcher or Path(), announce=False)


def _start_sweep(command: Command, runs: Sequence[Composed]) -> int:
    """Download what the runs of a new sweep need, and start them."""
    from agenttrain.commands.sweep import command as sweeps
    from agenttrain.settings.pinning import fetch

    for composed in runs:
        fetch(composed.config, command.verb)
    return sweeps.start(command, runs)


def _start_new(command: Command, composed: Composed) -> int:
    """Start a new run in a new folder. Needs a `hydra_session`.

    Raises ConfigError if the folder holds a run already. With resume=auto (`command.auto`) another
    node may have begun the run in the meantime: `_launch_new` then resumes it.
    """
    from agenttrain.settings.pinning import fetch

    typed_folder = named_folder(command.overrides)
    if typed_folder is not None and _holds_run(typed_folder) and not command.auto:
        raise _folder_is_taken(typed_folder)
    fetch(composed.config, command.verb)  # before the run folder: the download may fail
    return _launch_new(command, composed)


def _machine_problems(command: Command, runs: Sequence[Composed]) -> list[str]:
    """Return what this machine lacks for the runs.

    Raises ConfigError for the first problem of their files, processes or engines.
    """
    from agenttrain.commands.check import check_files
    from agenttrain.launch.processes import adopt_and_check_processes, count_gpus
    from agenttrain.settings.engine_checks import admit_engine
    from agenttrain.settings.machine import SAMPLING_VERBS, machine_problems

    check_files(runs)
    adopt_and_check_processes(command, runs)
    if command.verb in SAMPLING_VERBS:
        for composed in runs:
            admit_engine(composed, command.verb)
    return machine_problems(command.verb, [composed.config for composed in runs], count_gpus)


def _check(command: Command) -> int:
    """Check the parts of each run; return the exit code.

    Raises ConfigError with all problems: of the parts, the machine and the run folder.
    """
    with hydra_session(command.source):
        runs = compose_all(command)
        problems = _machine_problems(command, runs)
    folder = None if command.saved or command.sweep else named_folder(command.overrides)
    if folder is not None and _holds_run(folder):
        problems.append(str(_folder_is_taken(folder)))
    from agenttrain.commands.check import check

    try:
        code = check(command.verb, runs)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *problems])) from error
    raise_config_error(problems)
    return code


def _show(command: Command, args: Namespace) -> int:
    """Print the composed settings (`--cfg`), or Hydra's help or information about itself."""
    with hydra_session(command.source):
        if args.hydra_help or args.info:
            print_info(args.info, command.overrides, command.source)
            return 0
        raw = compose_raw(command.overrides, command.source, with_hydra=True)
        # `--cfg hydra` prints Hydra's section alone, `--cfg job` every other one.
        sections = [str(key) for key in raw if (key == "hydra") == (args.cfg == "hydra")]
        shown = raw if args.cfg == "all" else OmegaConf.masked_copy(raw, sections)
        section = None if args.package == "_global_" else args.package
        part = shown if section is None else OmegaConf.select(shown, section)
        if part is None:
            raise ConfigError(f"--package {section}: there is no such section")
        if not isinstance(part, Container):
            print(hide_secrets(str(part)))
            return 0
        if args.resolve:
            OmegaConf.resolve(part)
        head = "" if section is None else f"# @package {section}\n"
        print(hide_secrets(head + OmegaConf.to_yaml(part)), end="")
    return 0


@no_garbage_collection()
def compose_all(command: Command) -> list[Composed]:
    """Return the checked settings of every run; raises ConfigError. Needs a `hydra_session`.

    A saved run is a single one: `run` resumes saved sweeps without this function.
    """
    if command.saved is not None:
        return [_compose_saved(command, command.saved)]
    if not command.sweep:
        return [_compose_one(command.overrides, command)]
    from agenttrain.commands.sweep.expand import expand

    return compose_combinations(command, expand(command.overrides, command.source).runs)


def _compose_saved(command: Command, saved: Path) -> Composed:
    """Compose and check the settings of a saved run, with the command's changes."""
    from agenttrain.settings.checks import check_for_verb, validate
    from agenttrain.settings.pinning import pin
    from agenttrain.settings.saved import TRAINED, USED

    composed = _load_saved(command, saved)
    # Import only sections whose code the verb runs: the user was asked to trust these alone. A plan
    # imports none.
    code = () if command.verb == "plan" else USED.get(command.verb, TRAINED)
    validate(composed.config, code=code)
    pin(composed, command.verb)  # replaces revisions by commits
    check_for_verb(command.verb, composed.config, command.overrides)
    return composed


def compose_combinations(command: Command, combinations: Iterable[Sequence[str]]) -> list[Composed]:
    """Return the checked settings of a sweep's runs, of which each is given by its overrides.

    Raises ConfigError. Needs a `hydra_session`.
    """
    from agenttrain.commands.sweep.config import objective_problems

    runs = []
    for combination in combinations:
        try:
            # Without `raw`, which only a started run needs: a sweep may have thousands of runs.
            runs.append(replace(_compose_one(combination, command), raw=None))
        except ConfigError as error:
            typed = " ".join(as_typed(text) for text in combination)
            raise ConfigError(f"in the run {typed}\n{error}") from error
    if command.verb in SWEPT:
        verb = "train" if command.verb == CHECK else command.verb  # `check` checks a training
        problems = dict.fromkeys(
            text for run in runs for text in objective_problems(verb, run.config)
        )
        raise_config_error(problems)
    return runs


def _load_saved(command: Command, saved: Path) -> Composed:
    """Compose the settings of a saved run, with the command's changes."""
    from agenttrain.settings.saved import (
        TRAINED,
        USED,
        settings_for_auto_resume,
        settings_for_eval,
        settings_for_resume,
    )

    source, trust = command.source, command.trust
    # `used_sections` are those whose code the verb runs: the user has to trust it. By default
    # they are all that training uses, and for `settings_for_eval` all that an evaluation uses.
    changes = open_keys(command.overrides)  # which may name keys that no YAML file lists
    if command.auto:
        return settings_for_auto_resume(saved, changes, source, trust=trust)
    if command.verb in ("play", "serve"):
        used = USED[command.verb]
        return settings_for_eval(saved, changes, source, trust=trust, used_sections=used)
    if command.verb == "eval":
        # hydra.run.dir= names the evaluation's folder and changes nothing of the run.
        changes = [text for text in changes if not text.startswith(RUN_DIR)]
        return settings_for_eval(saved, changes, source, trust=trust)
    # train, sft and check resume the run; a plan is one of resuming it.
    used = USED.get(command.verb, TRAINED)
    return settings_for_resume(saved, changes, source, trust=trust, used_sections=used)


def _compose_one(overrides: Sequence[str], command: Command) -> Composed:
    """Compose and check one new run. Raises ConfigError."""
    verb = command.verb
    if not command.sweep and any(key_of(text).split(".")[0] == "sweep" for text in overrides):
        from agenttrain.commands.sweep.command import check_outside_sweep

        check_outside_sweep(overrides)
    # With starts=True a model that is not bundled has to come with an experiment: the default one
    # has the learning rate and limits of the bundled model.
    composed = compose_new(overrides, command.source, starts=verb in RUNNING)
    from agenttrain.settings.checks import check_for_verb, validate
    from agenttrain.settings.pinning import pin
    from agenttrain.settings.saved import check_new

    check_new(composed.config)  # refuses settings of resumed runs
    # A plan reads only the sizes of the model: its folder needs neither weights nor tokenizer.
    model_parts = SIZES if verb == "plan" else tuple(PARTS)
    validate(composed.config, model_parts)
    pin(composed, verb)  # after the cheap checks: asks the hub for the commits of revisions
    check_for_verb(verb, composed.config, overrides)
    return composed


def _continue_run(command: Command, saved: Path, composed: Composed) -> int:
    """Evaluate a saved run, or resume it; if it is finished, print how to train it further."""
    from agenttrain.settings.saved import finished_steps, run_of, stopped_when
    from agenttrain.training.config import Schedule

    if command.verb == "eval":
        folder = run_of(saved).parent / f"{datetime.now():{TIMESTAMP}}_eval"
        for text in command.overrides:
            if text.startswith(RUN_DIR):
                folder = Path(text.removeprefix(RUN_DIR))
        if _holds_run(folder):
            raise _folder_is_taken(folder)
        check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
        return _launch(command, composed, folder)
    # `_launch` calls it too, but a finished run is not launched: the caller learns of it here.
    command.before_start(saved, composed.config)
    # `steps` is the number of steps with which the run finished; None: it has not.
    steps, stop_when = finished_steps(saved), composed.config.stop_when
    stopped_early = stopped_when(saved, stop_when)
    if steps is None or (steps < composed.config.steps and not stopped_early):
        remedy = "make it writable, or copy the run and resume the copy"
        check_writable(saved, f"resume={saved}", remedy)
        return _launch(command, composed, saved)
    resume_command = f"agenttrain {resuming(command.verb)}resume={quote(str(saved))}"
    if stopped_early:
        # The bound that ended the run, which has to be removed to train on.
        bound = "below" if stop_when.above is None else "above"
        print(
            f"{saved}: finished after {steps} steps ({stop_when}); for more: {resume_command} "
            f"stop_when.{bound}=null"
        )
        return 0
    print(
        f"{saved}: finished after {steps} steps; for more of them: {resume_command} "
        f"steps={2 * steps}"
    )
    schedule = composed.config.optimizer.schedule
    if schedule is not Schedule.constant:
        print(
            f"(optimizer.schedule={schedule} ended at a learning rate near 0; over more steps it "
            "jumps back up)"
        )
    return 0


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def _folder_is_taken(folder: Path) -> ConfigError:
    return ConfigError(
        f"{RUN_DIR}{folder}: holds a run already; resume={quote(str(folder))} goes on with it, "
        "another name starts a new one"
    )


def _launch_new(command: Command, composed: Composed) -> int:
    """Make the folder of a new run and start it there."""

    def launch(folder: Path) -> int:
        """Start the run in the folder that was chosen for it."""
        if _holds_run(folder) and command.auto:  # another node has begun it in the meantime
            composed.config.resume = str(folder)
        if _holds_run(folder) and composed.config.resume is None:
            raise _folder_is_taken(folder)
        check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
        return _launch(command, composed, folder)

    return in_run_folder(composed, launch)


def _launch(command: Command, composed: Composed, folder: Path, *, announce: bool = True) -> int:
    """Start a composed command in its folder. `announce` is False where another process prints."""
    from agenttrain.launch.start import start
    from agenttrain.settings.pinning import fetch

    fetch(composed.config, command.verb)  # downloads nothing twice
    command.before_start(folder, composed.config)
    if announce:
        print(f"{command.verb} in {folder}", flush=True)
    from agenttrain.commands.sweep.record import is_job

    # A resumed run reads from its summary whether it belongs to a sweep.
    sweep = command.saved is None and is_job(folder)
    return start(command, composed, folder, program="agenttrain.cli", sweep=sweep)
