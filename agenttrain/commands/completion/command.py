"""`agenttrain completion`: the script by which bash or zsh completes verbs, groups and settings.

A shell asks for the script once, when it first completes `agenttrain`. The script holds all
candidates, so that no process of ours runs at a key press, and it is always that of the installed
version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from agenttrain.commands.settings import all_settings
from agenttrain.settings.verbs import VERBS
from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder, list_groups

SHELLS = ("bash", "zsh")
USAGE = f"completion {VERBS['completion'].usage}"
NAMED = ("tools", "reward")
"""Sections of components, whose names are those of the group's options."""
FOLDER = ("<run ", "<sweep ", "[tokenizer ")
"""Beginnings of the usage of a verb whose first argument is a folder."""
OPTIONS = ("-m", "--config-dir", "--cfg", "--help", "--version")
LOADERS = {
    "bash": 'eval "$(agenttrain completion bash)"\n',
    "zsh": '#compdef agenttrain\neval "$(agenttrain completion zsh)"\n_agenttrain "$@"\n',
}
"""Files that a shell loads at the first completion."""


def completion(arguments: Sequence[str]) -> int:
    """Run `completion bash|zsh|install [bash|zsh]`; exit code 0. Raises ConfigError."""
    match list(arguments):
        case [shell] if shell in SHELLS:
            print(script(shell), end="")
        case ["install"]:
            shell = Path(os.environ.get("SHELL", "")).name
            if shell not in SHELLS:
                raise ConfigError(
                    f"SHELL={os.environ.get('SHELL', '')}: no completion for this shell; name one "
                    "that has it: agenttrain completion install bash, or zsh"
                )
            install(shell)
        case ["install", shell] if shell in SHELLS:
            install(shell)
        case _:
            raise ConfigError(f"{' '.join(arguments) or 'completion'}: give {USAGE}")
    return 0


def install(shell: str) -> None:
    """Write the file that the shell loads, and print what is left to do."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    if shell == "bash":
        user = os.environ.get("BASH_COMPLETION_USER_DIR")
        file = (Path(user) if user else data / "bash-completion") / "completions" / "agenttrain"
    else:
        file = data / "zsh" / "site-functions" / "_agenttrain"
    there = file.is_file() and file.read_text(encoding="utf-8") == LOADERS[shell]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(LOADERS[shell], encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"completion install {shell}: {error.filename}: {error.strerror}; make it writable, or "
            f"load the script in your shell's startup file: {LOADERS['bash'].strip()}"
        ) from error
    print(f"{file}: {'is there already' if there else 'written'}")
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
    """Return the script for a shell: candidates, the code that both share, and the shell's own."""
    folder = Path(__file__).parent
    data = "\n".join(" ".join(line) for line in candidates())
    text = (folder / "core.sh").read_text(encoding="utf-8")
    text += (folder / f"{shell}.sh").read_text(encoding="utf-8")
    composing = " | ".join(name for name, verb in VERBS.items() if verb.settings)
    reading = " ".join(n for n, verb in VERBS.items() if verb.usage.startswith(FOLDER))
    text = text.replace("_AGENTTRAIN_SETTINGS_", composing)
    return f"_agenttrain_data='{data}'\n" + text.replace("_AGENTTRAIN_FOLDERS_", reading)


def candidates() -> Iterator[tuple[str, str]]:
    """Yield (kind, candidate).

    Kinds: `verb`, `option`, `own:<verb>`, `section` (the first part of a setting), `key`, and
    `value:<setting or group>`. A candidate with = or . at its end is the beginning of a word.
    """
    groups = list_groups(conf_folder())
    for name, verb in VERBS.items():
        yield "verb", name
        words = [option.partition(" ")[0] for option in verb.options]
        for word in (*verb.arguments, *words):
            # step=N -> step=, tools=live -> tools=live
            key, equals, value = word.partition("=")
            yield f"own:{name}", f"{key}=" if equals and value.isupper() else word
    yield from (("option", option) for option in OPTIONS)
    sections: dict[str, None] = {}
    for group, options in groups.items():
        sections[f"{group}="] = None
        yield from ((f"value:{group}", option) for option in options)
    for setting in all_settings():
        section, _, rest = setting.key.partition(".")
        names = [setting.key]
        if section in NAMED and rest.startswith("<name>."):
            names = [setting.key.replace("<name>", name) for name in groups[section]]
        elif "<" in setting.key:
            continue
        of_section = bool(rest) or setting.type == "keys and values"
        sections[f"{section}{'.' if of_section else '='}"] = None
        yield from (("own:settings", name) for name in (section,) if rest)
        for name in names:
            if rest:
                yield "key", f"{name}="
            yield from ((f"value:{name}", value) for value in setting.values)
    yield from (("section", name) for name in sections)
