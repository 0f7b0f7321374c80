"""Arguments of the verbs that take a folder, and the texts of `--help`.

Such a verb has a few `key=value` words of its own: `replay <run> step=3 rollout=ID`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from agenttrain.settings.saved import RESUMABLE
from agenttrain.settings.verbs import VERBS
from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder, list_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCommand:
    """Folder and words of a verb, as typed."""

    folder: Path
    words: dict[str, str]
    """The verb's own `key=value` words."""
    overrides: list[str]
    """Settings: the other words."""

    def step(self, usage: str) -> int | None:
        """Return the value of `step=`; raises ConfigError if it is not a number."""
        text = self.words.get("step")
        if text is not None and not text.isdecimal():
            raise ConfigError(f"step={text}: is no step's number; {usage}")
        return None if text is None else int(text)


def parse_folder(arguments: Sequence[str], keys: Sequence[str], usage: str) -> FolderCommand:
    """Parse the arguments of a verb with the words `keys`. Raises ConfigError, quoting `usage`."""
    # A folder's name may have a "=", as those of jobs of a sweep do.
    named = [word for word in arguments if "=" in word and Path(word).is_dir()]
    arguments = [word for word in arguments if word not in named]
    folders = [*named, *(word for word in arguments if "=" not in word)]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(usage)
    words: dict[str, str] = {}
    overrides = []
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            continue
        if key not in keys:
            overrides.append(text)
        elif key in words or not value:
            raise ConfigError(f"{text}: give {key}= one value; {usage}")
        else:
            words[key] = value
    return FolderCommand(folder=Path(folders[0]), words=words, overrides=overrides)


HELP = """\
agenttrain trains tool-calling language-model agents with reinforcement learning.

usage: agenttrain [verb] [key=value …] [options]

verbs (agenttrain <verb> --help: options and examples of one)
{verbs}

settings
  group=option                 choose an option: algorithm=rloo, tools=[calculator,final_answer]
  group.key=value              change one setting: optimizer.lr=1e-4, algorithm.group_size=16
  resume=<run folder>          resume a run; these may change:
{resumable}
  hydra.run.dir=<folder>       name the run folder (default outputs/<experiment>/<date>_<time>)

groups and their options
{groups}

options
  -m                           one run per combination: agenttrain -m seed=1,2 algorithm=grpo,rloo
  -m resume=<sweep folder>     run the unfinished jobs of a sweep
  --config-dir <folder>        add a folder of your own groups, e.g. <folder>/experiment/mine.yaml
  --cfg job                    print the composed configuration (--info, --hydra-help: see Hydra)
  --version

examples
  agenttrain                                         train the bundled agent
  agenttrain debug=tiny                              the same in seconds, as a test of this machine
  agenttrain experiment=calculator algorithm=rloo    another task, another algorithm
  agenttrain init my_agent                           begin an agent of your own
  agenttrain check algorithm.group_size=16           print that run, and check it
  agenttrain experiment=none model.path=my_model tools=[] tools.find._target_=my_tools.find

Your own modules are imported from the current folder. `agenttrain settings` prints every setting
with its meaning and default; the groups are in {conf}
"""


INDENT = " " * 31


def help_text() -> str:
    """Return the text of `--help`."""
    conf = conf_folder()
    return HELP.format(
        verbs="\n".join(f"  {name:<10} {verb.does}" for name, verb in VERBS.items()),
        groups="\n".join(
            fill(
                f"{name:<16} {', '.join(options)}",
                width=100,
                initial_indent="  ",
                subsequent_indent=" " * 19,
                break_on_hyphens=False,
            )
            for name, options in list_groups(conf).items()
        ),
        resumable=fill(
            ", ".join(RESUMABLE), width=100, initial_indent=INDENT, subsequent_indent=INDENT
        ),
        conf=conf,
    ).rstrip()


def verb_help(name: str) -> str:
    """Return the text of `agenttrain <name> --help`."""
    verb = VERBS[name]
    parts = [f"agenttrain {name}: {verb.does}\n\nusage: agenttrain {name} {verb.usage}"]
    for title, rows in (
        ("options", verb.options),
        ("examples", {f"agenttrain {words}": text for words, text in verb.examples.items()}),
    ):
        width = max(map(len, rows), default=0)
        if rows:
            lines = "\n".join(f"  {left:<{width}}  {text}" for left, text in rows.items())
            parts.append(f"{title}\n{lines}")
    if verb.settings:
        parts.append("`agenttrain --help` prints the groups, `agenttrain settings` every setting.")
    parts.append(f"docs/{verb.page} has more.")
    return "\n\n".join(parts)


def verbs_page() -> str:
    """Return the page docs/reference/verbs.md."""
    parts = [
        "# Verbs\n\n`agenttrain <verb> --help` prints the same. Without one, `agenttrain` trains.\n"
        "The [command line](command-line.md) says what they share: overrides, options, errors.\n"
    ]
    for name, verb in VERBS.items():
        text = f"## {name}\n\n{verb.does[0].upper()}{verb.does[1:]} ([more](../{verb.page})).\n"
        text += f"\n    agenttrain {name} {verb.usage}\n"
        if verb.options:
            rows = (f"| `{option}` | {meaning} |" for option, meaning in verb.options.items())
            text += "\n" + "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"
        lines = (f"# {meaning}\nagenttrain {words}" for words, meaning in verb.examples.items())
        text += "\n```text\n" + "\n".join(lines) + "\n```\n"
        parts.append(text)
    return "\n".join(parts)


def write_report(file: Path, report: Mapping[str, Any]) -> None:
    """Write the report of `json=FILE`; raises ConfigError where it cannot be written."""
    try:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json={file}: {error.strerror}; name another file") from error
