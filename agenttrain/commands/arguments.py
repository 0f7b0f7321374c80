"""Arguments of the verbs that take a folder, and the text of `agenttrain --help`.

Such a verb has a few `key=value` words of its own: `replay <run> step=3 rollout=ID`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from agenttrain.settings.command_line import VERBS
from agenttrain.settings.saved import RESUMABLE
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
    folders = [word for word in arguments if "=" not in word]
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

verbs
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
  agenttrain check algorithm.group_size=16           print that run, and check it
  agenttrain plan --gpu-memory-gb 80 model=folder model.path=my_model    does it fit?
  agenttrain sft experiment=shop_warmstart           rebuild the bundled agent from demonstrations
  agenttrain eval run=outputs/shop/<run> data.test.split=test_phrasing eval.samples=4
  agenttrain data --rows 5 data=file data.path=rows.jsonl data.test_fraction=0.1   see the prompts
  agenttrain tools --call sql '{{"query": "SELECT 1"}}'  the tools as the model sees them; try one
  agenttrain view outputs/shop/<run> step=10         see every token of those rollouts
  agenttrain replay outputs/shop/<run> step=10 rollout=train-10-0-0    the same ids again?
  agenttrain rescore outputs/shop/<run> reward=[numeric_close] to=scores.jsonl   another reward
  agenttrain play run=outputs/shop/<run>             talk to the agent (step=0: and as it was)
  agenttrain serve run=outputs/shop/<run> port=8000  OpenAI's chat API
  agenttrain export run=outputs/shop/<run> to=my_agent   the trained model, with a card
  agenttrain experiment=none model.path=my_model tools=[] tools.find._target_=my_tools.find

Your own modules are imported from the current folder. `agenttrain settings` prints every setting
with its meaning and default; the groups are in {conf}
"""


INDENT = " " * 31


def help_text() -> str:
    """Return the text of `--help`."""
    conf = conf_folder()
    return HELP.format(
        verbs="\n".join(f"  {name:<10} {text}" for name, text in VERBS.items()),
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
