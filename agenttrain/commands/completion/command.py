"""`agenttrain completion`: the script by which bash or zsh completes verbs, groups and settings.

A shell asks for the script once, when it first completes `agenttrain`. The script holds all
candidates, so that no process of ours runs at a key press, and it is always that of the installed
version.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agenttrain.commands.verb import VERBS, new_file, report_file, values_of
from agenttrain.commands.verbs import DECLARED
from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder, list_groups

SHELLS = ("bash", "zsh")
COMPONENT_SECTIONS = ("tools", "reward")
"""Sections of components, whose names are those of the group's options."""
OPTIONS = ("--help", "--version")
"""Options of every verb."""
LOADERS = {
    "bash": 'eval "$(agenttrain completion bash)"\n',
    "zsh": '#compdef agenttrain\neval "$(agenttrain completion zsh)"\n_agenttrain "$@"\n',
}
"""Files that a shell loads at the first completion."""


def completion(args: Namespace) -> int:
    """Print a shell's script, or install it; exit code 0. Raises ConfigError.

    `args.what` is the shell whose script is printed, or `install`.
    """
    what, shell = args.what, args.shell
    if what != "install":
        if shell is not None:
            raise ConfigError(
                f"{shell}: leave it out, or write agenttrain completion install {shell}"
            )
        print(script(what), end="")
        return 0
    shell_path = os.environ.get("SHELL", "")
    shell = shell or Path(shell_path).name
    if shell not in SHELLS:
        raise ConfigError(
            f"SHELL={shell_path}: no completion for this shell; name one that has it: agenttrain "
            "completion install bash, or zsh"
        )
    install(shell)
    return 0


def install(shell: str) -> None:
    """Write the file that the shell loads, and print what is left to do."""
    data_home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    if shell == "bash":
        user = os.environ.get("BASH_COMPLETION_USER_DIR")
        file = (
            (Path(user) if user else data_home / "bash-completion") / "completions" / "agenttrain"
        )
    else:
        file = data_home / "zsh" / "site-functions" / "_agenttrain"
    was_there = file.is_file() and file.read_text(encoding="utf-8") == LOADERS[shell]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(LOADERS[shell], encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"completion install {shell}: {error.filename}: {error.strerror}; make it writable, or "
            f'add this line to your shell\'s startup file: eval "$(agenttrain completion {shell})"'
        ) from error
    print(f"{file}: {'is there already' if was_there else 'written'}")
    if shell == "bash":
        print(
            "New shells complete agenttrain if the package bash-completion is installed and "
            f"loaded.\nWithout it add this line to ~/.bashrc: . {file}"
        )
    else:
        print(
            "Add these lines to ~/.zshrc, unless that folder is in fpath already, and start a new "
            f"shell:\n  fpath=({file.parent} $fpath)\n  autoload -Uz compinit && compinit"
        )
    if shutil.which("agenttrain") is None:
        print("note: `agenttrain` is not on the PATH; the shell completes it once it is")


def script(shell: str) -> str:
    """Return the script for a shell: candidates, the code of all shells, the code of this one."""
    folder = Path(__file__).parent
    data = "\n".join(" ".join(line) for line in candidates())
    text = (folder / "core.sh").read_text(encoding="utf-8")
    text += (folder / f"{shell}.sh").read_text(encoding="utf-8")
    verbs = {name: DECLARED[name] for name in VERBS}
    parsers = {name: verb.parser() for name, verb in verbs.items()}
    # The shell's code has placeholders for four lists of names.
    with_settings = " | ".join(name for name, verb in verbs.items() if verb.settings is not None)
    with_folder = " ".join(
        name for name, parser in parsers.items() if any(a.type is Path for a in parser.positionals)
    )
    file_options = {
        option
        for parser in parsers.values()
        for option, action in parser.options.items()
        if action.type in (Path, new_file, report_file)
    }
    options_with_values = {
        option
        for parser in parsers.values()
        for option, action in parser.options.items()
        if values_of(action)
    }
    text = text.replace("_AGENTTRAIN_SETTINGS_", with_settings)
    text = text.replace("_AGENTTRAIN_VALUE_OPTIONS_", " ".join(sorted(options_with_values)))
    text = text.replace("_AGENTTRAIN_FILE_OPTIONS_", " ".join(sorted(file_options)))
    return f"_agenttrain_data='{data}'\n" + text.replace("_AGENTTRAIN_FOLDERS_", with_folder)


def candidates() -> Iterator[tuple[str, str]]:
    """Yield (kind, candidate).

    Kinds: `verb`, `option`, `own:<verb>` (words of one verb), `section` (the first part of a
    setting), `key`, `value:<setting or group>` and `value:<verb>:<option>`. A candidate with = or .
    at its end is the beginning of a word.
    """
    groups = list_groups(conf_folder())
    for name in VERBS:
        yield "verb", name
        yield from _candidates_of_verb(name)
    yield from (("option", option) for option in OPTIONS)
    for group, options in groups.items():
        yield from ((f"value:{group}", option) for option in options)
    yield from _candidates_of_settings(groups)


def _candidates_of_verb(name: str) -> Iterator[tuple[str, str]]:
    """Yield the words of one verb: its options, their values, its arguments and its settings."""
    verb = DECLARED[name]
    parser = verb.parser()
    words = [option for option in parser.options if option.startswith("--") or option == "-m"]
    for argument in parser.positionals:
        words += values_of(argument)
    for option, action in parser.options.items():
        yield from ((f"value:{name}:{option}", value) for value in values_of(action))
    for text in verb.settings or ():
        # Help texts write a value literally in lower case (trust=true), and a placeholder for one
        # in capitals (resume=FOLDER): of that only `resume=` is completed.
        key, _, value = text.partition("=")
        words.append(text if value.islower() else f"{key}=")
    yield from ((f"own:{name}", word) for word in dict.fromkeys(words))


def _candidates_of_settings(groups: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the keys of all settings, their values, and the sections that begin them.

    `groups` has the options of each group. A key with a placeholder is left out, except where it
    stands for a group's option: ``tools.<name>.timeout_s`` is one key for each tool of the group.
    """
    from agenttrain.commands.settings import all_settings

    sections = [f"{group}=" for group in groups]
    for setting in all_settings():
        section, _, subkey = setting.key.partition(".")
        if section in COMPONENT_SECTIONS and subkey.startswith("<name>."):
            keys = [setting.key.replace("<name>", name) for name in groups[section]]
        elif "<" in setting.key:
            continue
        else:
            keys = [setting.key]
        has_subkeys = bool(subkey) or setting.type == "keys and values"
        sections.append(f"{section}." if has_subkeys else f"{section}=")
        if subkey:
            yield "own:settings", section  # for the verb: agenttrain settings optimizer
        for key in keys:
            if subkey:
                yield "key", f"{key}="
            yield from ((f"value:{key}", value) for value in setting.values)
    yield from (("section", section) for section in dict.fromkeys(sections))
