"""`agenttrain check`, and the checks of files and templates that `agenttrain submit` makes too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agenttrain.commands.verb import as_config_error
from agenttrain.settings.command_line import CHECK
from agenttrain.settings.compose import Composed
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.sizes import describe
from agenttrain.utils.garbage import no_garbage_collection

if TYPE_CHECKING:
    from agenttrain.runs.setup import Components


def check(verb: str, runs: Sequence[Composed]) -> int:
    """Print the runs, each template's certificate, and a dry conversation of outside agents.

    Return exit code 1 if a certificate did not pass. For `play` and `serve` nothing more is done:
    the settings are checked already.
    """
    if verb in ("play", "serve"):
        print(f"these settings fit agenttrain {verb}")
        return 0
    print("\n\n".join(describe(run.config) for run in runs), flush=True)
    # `neutral`: the user named a model and no experiment. The default, experiment=shop, has the
    # learning rate and limits of the bundled model, so that experiment=none took its place.
    if any(run.neutral for run in runs):
        print(
            "\nexperiment     none: model.path is not the bundled agent, whose settings "
            "experiment=shop would be;\n               to train, add experiment=none and name "
            "data, tools and rewards of your own",
            flush=True,
        )
    checked_verb = "train" if verb == CHECK else verb  # `agenttrain check` alone names no verb
    passed = certify(runs, checked_verb)
    if passed and checked_verb != "sft":  # supervised learning starts no agent
        _converse(runs)
    # Notes on what slows a run down on a GPU: on a machine without one they would only confuse.
    notes = dict.fromkeys(note for run in runs if (note := float32_on_gpu(run.config)))
    if notes:
        import torch  # only now: wrong settings are reported without waiting for the import

        if torch.cuda.is_available():
            print("\n" + "\n".join(notes), flush=True)
    return 0 if passed else 1


def _converse(runs: Sequence[Composed]) -> None:
    """Print a dry conversation of each distinct outside agent; raises ConfigError if it fails.

    An outside agent is a program of the user's that talks to the policy as to a server of a chat
    API. In a dry conversation it runs once with a scripted model, which calls a tool and answers.
    """
    outside = [run.config for run in runs if run.config.agent.outside]
    if not outside:
        return
    from agenttrain.commands.dry_conversation import converse  # imports torch

    # Runs of a sweep that agree in all sections that a conversation depends on have the same one:
    # print it once. CERTIFIED are the sections of template, tools and rows.
    parts = (*CERTIFIED, "agent", "rollout")
    distinct = {repr([getattr(config, part) for part in parts]): config for config in outside}
    for config in distinct.values():
        print(converse(config), flush=True)


def check_files(runs: Sequence[Composed]) -> None:
    """Raise ConfigError for a template or response schema of the user that cannot be read."""
    groups = (run.config.chat_template for run in runs)
    templates = {(str(group.path), group.revision) for group in groups if group.path is not None}
    schemas = {run.config.response_schema.path for run in runs} - {None}
    if not templates and not schemas:
        return
    from agenttrain.chat.loading import read_spec, read_template  # imports tokenizers

    with as_config_error():
        for template, revision in templates:
            read_template(template, revision)
        for path in schemas:
            read_spec(Path(str(path)))


CERTIFIED = (
    *("model", "chat_template", "response_schema", "tools", "stop_tools", "environment"),
    *("data", "reward"),
)
"""Sections that the certificate, the rows and their prompts depend on."""


@no_garbage_collection()
def certify(runs: Sequence[Composed], verb: str) -> bool:
    """Print each template's certificate once; return True if all passed.

    Also checks the components of every run, as a run of `verb` does before it loads weights. Raises
    ConfigError. Garbage is not collected meanwhile: collections during the imports only cost time.
    """
    check_files(runs)
    # These import tokenizers and torch.
    from agenttrain.runs.fingerprints import check_resumed
    from agenttrain.runs.sampling import verify_model
    from agenttrain.runs.setup import Components, complete

    # Runs of a sweep often agree in the settings that a check reads: each check is made once for
    # each distinct value of these settings. `certificate_key` is for `verify_model` and the
    # certificate: model, template, tools, rows. `run_key` has also what only `complete` and
    # `check_resumed` read, and is for these two.
    certified: dict[str, Components] = {}
    completed: set[str] = set()
    for config in (run.config for run in runs):
        structured = config.rollout.structured_calls
        certificate_key = repr([structured, *(getattr(config, part) for part in CERTIFIED)])
        # The settings that `complete` and `check_resumed` read besides.
        other_settings = [config.engine, config.eval, config.training, config.optimizer.name]
        other_settings += [config.algorithm.teacher, config.algorithm.router_replay, config.roles]
        other_settings += [config.weight_sync]
        run_key = repr([certificate_key, *other_settings, config.tasks_per_step, config.resume])
        with as_config_error():
            is_first = certificate_key not in certified
            if is_first:
                verify_model(config)
                certified[certificate_key] = Components(config, verb)
                lines = certified[certificate_key].certificate.lines()
                print("\n" + "\n".join(lines), flush=True)
            if not certified[certificate_key].certificate.passed or run_key in completed:
                continue
            completed.add(run_key)
            components = certified[certificate_key].with_config(config)
            complete(components)
            if is_first:
                _print_notes(components, config)
            check_resumed(components)
    return all(components.certificate.passed for components in certified.values())


def _print_notes(components: Components, config: RunConfig) -> None:
    """Print the lengths of the prompts, and the notes on a run's components."""
    from agenttrain.runs.setup import overlong_notes, sampling_note  # imports torch

    prompts = "; ".join(
        f"the first {len(sizes)} of {section} have {min(sizes)} to {max(sizes)} tokens"
        for section, sizes in components.prompt_lengths.items()
        if sizes
    )
    print(f"prompts        {prompts or 'given by the environment'}")
    notes: list[str | None] = [*components.notes, *overlong_notes(components)]
    if components.verb != "sft":  # supervised learning reads no rewards and samples nothing
        notes += [*components.alarms(), sampling_note(config)]
    for note in notes:
        if note is not None:
            print(note)
