"""The `agenttrain` command: its verbs and overrides, and the checks before anything heavy starts.

A command is composed and checked first, so that a mistake costs a second and leaves no folder;
then Hydra takes over, makes the run folder (or those of a sweep) and calls `_launch`. Nothing in
this module imports torch before that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from shlex import quote

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from agenttrain.commands.arguments import help_text, verb_help
from agenttrain.commands.check import certify, check, check_files
from agenttrain.commands.completion.command import completion
from agenttrain.commands.init.command import init
from agenttrain.commands.records import replay, rescore, view
from agenttrain.commands.settings import settings
from agenttrain.commands.sweep import command as cli_sweep
from agenttrain.commands.sweep.compare import compare
from agenttrain.commands.sweep.config import objective_problems
from agenttrain.commands.sweep.expand import expand
from agenttrain.commands.sweep.process import end_with_sweep
from agenttrain.commands.sweep.record import is_job
from agenttrain.commands.timeline import timeline
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
    check_for_verb,
    check_init,
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
    typed_verb,
)
from agenttrain.settings.compose import (
    HYDRA_VERSION,
    Composed,
    check_writable,
    compose_new,
    compose_raw,
    convert,
    hydra_session,
    open_keys,
    register,
)
from agenttrain.settings.engine_checks import admit_engine, typed_engine
from agenttrain.settings.machine import CHECK, SAMPLING_VERBS, Machine, machine_problems
from agenttrain.settings.pinning import fetch, pin
from agenttrain.settings.saved import (
    TRAINED,
    USED,
    check_new,
    evaluated,
    finished_steps,
    resumed,
    resumed_as_begun,
    run_of,
    stopped_when,
)
from agenttrain.training.config import Schedule
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED
from agenttrain.utils.files import conf_folder
from agenttrain.utils.garbage import exit_without_collection
from agenttrain.utils.model_path import PARTS, SIZES
from agenttrain.utils.output import lost_output, protect
from agenttrain.utils.overrides import as_typed
from agenttrain.utils.redaction import hide_secrets

RUNNING_VERBS = ("train", "sft", "eval")
"""Verbs that a sweep can run."""
SHORT_ANSWERS = {"--help", "-h", "--version"}
"""Options that print and run nothing, whatever the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code (`utils/exit_codes.py`)."""
    protect()
    exit_without_collection()
    end_with_sweep()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # As with `python -m`, `_target_: my_tools.find` finds the user's modules in the current folder.
    # It comes last, so that no file there hides an installed package.
    sys.path.append(os.getcwd())
    # The results of a run are in its folder; those of the other verbs are what they print.
    prints = SHORT_ANSWERS & set(arguments) or split_verb(arguments)[0] not in RUNNING_VERBS
    if started_by_others() and prints and os.environ["RANK"] != "0":
        return DONE
    code = _dispatch(arguments)
    if started_by_others() and not prints:
        leave(code)
    if lost := lost_output():
        print(f"agenttrain: {lost}", file=sys.stderr)
        if code == DONE and prints:
            return FAILED
    return code


def _dispatch(arguments: list[str]) -> int:
    """Call the verb's function, and print the errors that it raises."""
    verb, words = split_verb(arguments)
    try:
        if {"--help", "-h"} & set(arguments):
            typed = typed_verb(arguments)
            print(help_text() if typed is None else verb_help(typed))
            return DONE
        if "--version" in arguments:
            print(f"agenttrain {version('agenttrain')}")
            return DONE
        if verb == "templates":
            from agenttrain.commands.templates import main as templates  # imports tokenizers

            return templates(words)
        if verb == "export":
            from agenttrain.commands.export import main as export

            return export(words)
        if verb == "doctor":
            from agenttrain.commands.doctor import doctor

            return doctor(words)
        if verb == "engine-server":
            from agenttrain.commands.engine_server import engine_server

            return engine_server(words)
        if verb == "servers":
            from agenttrain.commands.servers import servers

            return servers(words)
        if verb == "submit":
            from agenttrain.commands.slurm.submit import submit

            return submit(words, compose_all, certify)
        command = {
            "settings": settings,
            "completion": completion,
            "init": init,
            "view": view,
            "timeline": timeline,
            "tools": _tools,
            "data": _data,
            "replay": replay,
            "rescore": rescore,
            "compare": compare,
            "plan": _plan,
            "rehearse": _rehearse,
            "play": _play,
            "serve": _serve,
        }.get(verb)
        if command is not None:
            return command(words)
        if started_by_others() and verb in RUNNING_VERBS:
            return as_rank(lambda: run(arguments), verb)
        return run(arguments)
    except ConfigError as error:
        for line in hide_secrets(str(error)).splitlines():
            print(f"agenttrain: {line}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def run(arguments: Sequence[str]) -> int:
    """Run the verb of a command line that composes settings; return the exit code.

    Each worker of a run calls it with the launcher's command line. Raises ConfigError.
    """
    command = parse(arguments)
    if command.shows is not None:
        if command.shows != "other":
            # Compose first: Hydra's own errors would be harder to read than ours.
            with hydra_session(command.source):
                compose_raw(command.overrides, command.source)
        with redirect_stdout(StringIO()) as printed:
            code = _hand_over(command)
        print(hide_secrets(printed.getvalue()), end="")
        return code
    with hydra_session(command.source):
        if command.sweep and command.saved is not None:
            return cli_sweep.resume(command, _compose_one)
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
            for run in runs:
                fetch(run.config, command.verb)
            return cli_sweep.start(command, runs)
    if command.verb == CHECK:
        return _check(command, runs, problems)
    folder = assigned_folder()
    if folder is not None:
        return _launch(command, runs[0], folder, announce=False)
    if command.saved is not None:
        return _continue_run(command, command.saved, runs[0])
    if is_later_node(runs[0].config.distributed):
        return _launch(command, runs[0], Path(), announce=False)
    if not command.sweep:
        named = named_folder(command.overrides)
        if named is not None and _holds_run(named) and not command.auto:
            raise _taken(named)
        fetch(runs[0].config, command.verb)  # before the run folder: the download may fail
    return _hand_over(command)


def _check(command: Command, runs: Sequence[Composed], problems: Sequence[str]) -> int:
    """Check the parts of each run; raise their problems together with the machine's and those of
    the run folder."""
    problems = list(problems)
    folder = None if command.saved or command.sweep else named_folder(command.overrides)
    if folder is not None and _holds_run(folder):
        problems.append(str(_taken(folder)))
    try:
        code = check(command, runs)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *problems])) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return code


def compose_all(command: Command) -> list[Composed]:
    """Return the checked settings of every run; raises ConfigError. Needs a `hydra_session`."""
    overrides, source = command.overrides, command.source
    if command.saved is not None:
        composed = _load_saved(command, command.saved)
        # Only code that the verb runs is imported: the user has been asked to trust no other.
        code = () if command.verb == "plan" else USED.get(command.verb, TRAINED)
        validate(composed.config, code=code)
        pin(composed, command.verb)
        check_verb(command.verb, overrides)
        check_for_verb(command.verb, composed.config, overrides)
        return [composed]
    if not command.sweep:
        return [_compose_one(overrides, command)]
    runs = []
    for combination in expand(overrides, source).runs:
        try:
            runs.append(_compose_one(combination, command))
        except ConfigError as error:
            typed = " ".join(as_typed(text) for text in combination)
            raise ConfigError(f"in the run {typed}\n{error}") from error
    if command.verb in (*RUNNING_VERBS, CHECK):
        verb = "train" if command.verb == CHECK else command.verb
        problems = dict.fromkeys(
            text for run in runs for text in objective_problems(verb, run.config)
        )
        if problems:
            raise ConfigError("\n".join(problems))
    return runs


def _load_saved(command: Command, saved: Path) -> Composed:
    """Compose the settings of a saved run, with the command's changes."""
    source, trust = command.source, command.trust
    if command.auto:
        return resumed_as_begun(saved, open_keys(command.overrides), source, trust=trust)
    if command.verb in ("play", "serve"):
        changes, runs = open_keys(command.overrides), USED[command.verb]
        return evaluated(saved, changes, source, trust=command.trust, runs=runs)
    if command.verb == "eval":
        # hydra.run.dir= names the evaluation's folder and changes nothing of the run.
        changes = [text for text in command.overrides if not text.startswith(RUN_DIR)]
        return evaluated(saved, open_keys(changes), source, trust=trust)
    runs = USED.get(command.verb, TRAINED)
    return resumed(saved, open_keys(command.overrides), source, trust=trust, runs=runs)


def _compose_one(overrides: Sequence[str], command: Command) -> Composed:
    """Compose and check one new run."""
    if not command.sweep:
        cli_sweep.check_outside_sweep(overrides)
    composed = compose_new(overrides, command.source, starts=command.verb in RUNNING_VERBS)
    check_new(composed.config)
    validate(composed.config, SIZES if command.verb == "plan" else tuple(PARTS))
    pin(composed, command.verb)
    check_verb(command.verb, overrides)
    check_init(command.verb, composed.config)
    check_for_verb(command.verb, composed.config, overrides)
    return composed


def _continue_run(command: Command, saved: Path, composed: Composed) -> int:
    """Resume or evaluate a run. Hydra is left out, because it would make a folder of its own."""
    if command.verb == "eval":
        folder = run_of(saved).parent / f"{datetime.now():{TIMESTAMP}}_eval"
        for text in command.overrides:
            if text.startswith(RUN_DIR):
                folder = Path(text.removeprefix(RUN_DIR))
        if _holds_run(folder):
            raise _taken(folder)
        check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
        return _launch(command, composed, folder)
    done, end = finished_steps(saved), composed.config.stop_when
    ended = stopped_when(saved, end)
    if done is None or (done < composed.config.steps and not ended):
        remedy = "make it writable, or copy the run and resume the copy"
        check_writable(saved, f"resume={saved}", remedy)
        return _launch(command, composed, saved)
    more = f"agenttrain {resuming(command.verb)}resume={quote(str(saved))} "
    if ended:
        off = "below" if end.above is None else "above"
        print(f"{saved}: finished after {done} steps ({end}); for more: {more}stop_when.{off}=null")
        return 0
    print(f"{saved}: finished after {done} steps; for more of them: {more}steps={2 * done}")
    schedule = composed.config.optimizer.schedule
    if schedule is not Schedule.constant:
        print(
            f"(optimizer.schedule={schedule} ended at a learning rate near 0; over more steps it "
            "jumps back up)"
        )
    return 0


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
    refusals: list[ConfigError] = []
    begun: list[bool] = []

    def job(raw: DictConfig) -> None:
        begun.append(True)
        folder = Path(HydraConfig.get().runtime.output_dir)
        composed = convert(raw)
        pin(composed, command.verb)
        if _holds_run(folder) and command.auto:  # another node has begun it in the meantime
            composed.config.resume = str(folder)
        try:
            if _holds_run(folder) and composed.config.resume is None:
                raise _taken(folder)
            check_writable(folder, f"{RUN_DIR}{folder}", f"name another folder: {RUN_DIR}…")
            codes.append(_launch(command, composed, folder))
        except ConfigError as error:
            # Raised after Hydra has returned: it would print an error message of its own.
            refusals.append(error)

    register()
    # Errors in the configuration have been reported by now. What Hydra meets from here on is a
    # bug, and its shortened traceback would hide the place.
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
    if refusals:
        raise refusals[0]
    return max(codes, default=0)


def _compose_single(command: Command, purpose: str) -> Composed:
    """Compose the settings of a command about one run; `purpose` begins the error about -m."""
    if command.sweep:
        raise ConfigError(f"{purpose}; leave -m out")
    with hydra_session(command.source):
        (composed,) = compose_all(command)
    return composed


def _data(arguments: Sequence[str]) -> int:
    """Run `data [--rows N] [overrides]`: print the rows as the model will see them."""
    from agenttrain.commands import data as show_data

    options, overrides = show_data.parse(arguments)
    composed = _compose_single(
        replace(parse(overrides), verb="data"), "data -m: shows the rows of one run"
    )
    return show_data.show(composed.config, options)


def _plan(arguments: Sequence[str]) -> int:
    """Run `plan [--gpu-memory-gb 80] [--devices 8] [overrides]`: print the memory per GPU, from
    config.json."""
    from agenttrain.commands.plan import command as planning

    options, overrides = planning.parse(arguments)
    composed = _compose_single(parse(["plan", *overrides]), "plan -m: plans one run")
    admit_engine(composed)
    return planning.show(composed.config, options)


def _rehearse(arguments: Sequence[str]) -> int:
    """Run `rehearse [rollouts=64] [tokens_per_s=N] [json=FILE] [overrides]`: make rollouts with a
    stub in the place of the model."""
    from agenttrain.commands.rehearse import command as rehearsal

    options, overrides = rehearsal.parse(arguments)
    composed = _compose_single(parse(overrides), "rehearse -m: rehearses one run")
    check_files([composed])
    return rehearsal.rehearse(composed.config, options)


def _play(arguments: Sequence[str]) -> int:
    """Run `play [run=<folder>] [step=N|0|best] [row=N] [overrides]`: talk to an agent."""
    from agenttrain.commands import play

    options, overrides = play.parse(arguments)
    composed = _compose_single(parse(["play", *overrides]), "play -m: talks to one agent")
    admit_engine(composed)
    play.check_engine(composed.config, overrides)
    return play.play(composed.config, options)


def _serve(arguments: Sequence[str]) -> int:
    """Run `serve [run=<folder>] [step=N|best] [host=…] [port=…] [hosts=…] [name=…] [overrides]`:
    answer chat requests."""
    from agenttrain.commands import serve

    options, overrides = serve.parse(arguments)
    composed = _compose_single(parse(["serve", *overrides]), "serve -m: serves one agent")
    admit_engine(composed)
    named = typed_engine(overrides) is not None
    return serve.serve(composed.config, options, engine_named=named)


def _tools(arguments: Sequence[str]) -> int:
    """Run `tools [--row N] [--task ID] [--call NAME JSON] [--json] [overrides]`: print the model's
    tools, or call them."""
    from agenttrain.commands import tools as show_tools

    options, overrides = show_tools.parse(arguments)
    composed = _compose_single(
        replace(parse(overrides), verb="tools"), "tools -m: shows the tools of one run"
    )
    return show_tools.show(composed.config, options)


def _launch(command: Command, composed: Composed, folder: Path, *, announce: bool = True) -> int:
    """Start a composed command in its folder. `announce` is False where another process prints."""
    fetch(composed.config, command.verb)
    if announce:
        print(f"{command.verb} in {folder}", flush=True)
    sweep = command.saved is None and is_job(folder)
    return start(command, composed, folder, program="agenttrain.cli", sweep=sweep)


if __name__ == "__main__":
    sys.exit(main())
