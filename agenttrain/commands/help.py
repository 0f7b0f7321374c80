"""The texts of `--help`, and the page docs/reference/verbs.md, made of the verbs' parsers."""

from __future__ import annotations

from textwrap import fill

from agenttrain.commands.verb import VERBS, Verb, VerbParser, option_rows
from agenttrain.commands.verbs import DECLARED, DEFAULT
from agenttrain.settings.resumable import RESUMABLE
from agenttrain.utils.files import conf_folder, list_groups

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
{options}
  --version                    print the version

examples
  agenttrain                                         train the bundled agent
  agenttrain debug=tiny                              the same in seconds, as a test of this machine
  agenttrain experiment=calculator algorithm=rloo    another task, another algorithm
  agenttrain -m seed=1,2 algorithm=grpo,rloo         one run per combination
  agenttrain -m resume=<sweep folder>                run the unfinished jobs of a sweep
  agenttrain init my_agent                           begin an agent of your own
  agenttrain check algorithm.group_size=16           print that run, and check it
  agenttrain experiment=none model.path=my_model tools=[] tools.find._target_=my_tools.find

Your own modules are imported from the current folder. `agenttrain settings` prints every setting
with its meaning and default; the groups are in {conf}
"""
INDENT = " " * 31


def help_text() -> str:
    """Return the text of `agenttrain --help`."""
    conf = conf_folder()
    groups = list_groups(conf)
    width = max(map(len, groups))
    options = option_rows(DECLARED[DEFAULT].parser()).items()
    return HELP.format(
        verbs="\n".join(f"  {name:<14} {DECLARED[name].help}" for name in VERBS),
        groups="\n".join(
            fill(
                f"{name:<{width}} {', '.join(names)}",
                width=100,
                initial_indent="  ",
                subsequent_indent=" " * (width + 3),
                break_on_hyphens=False,
            )
            for name, names in groups.items()
        ),
        resumable=fill(
            ", ".join(RESUMABLE), width=100, initial_indent=INDENT, subsequent_indent=INDENT
        ),
        options="\n".join(f"  {option:<28} {meaning}" for option, meaning in options),
        conf=conf,
    ).rstrip()


def verb_help(name: str) -> str:
    """Return the text of `agenttrain <name> --help`."""
    return DECLARED[name].parser().format_help().rstrip()


def verbs_page() -> str:
    """Return the page docs/reference/verbs.md."""
    head = (
        "# Verbs\n\n`agenttrain <verb> --help` prints the same. Without one, `agenttrain` trains.\n"
        "The [command line](command-line.md) says what they share: settings, options, errors.\n"
    )
    return "\n".join([head, *(_section(DECLARED[name]) for name in VERBS)])


def _section(verb: Verb) -> str:
    """Return the section of a verb."""
    parser = verb.parser()
    rows = {**arguments(parser), **option_rows(parser), **(verb.settings or {})}
    text = f"## {verb.name}\n\n{verb.help[0].upper()}{verb.help[1:]} ([more](../{verb.page})).\n"
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    text += f"\n    {usage}\n"
    lines = (f"| `{name}` | {meaning} |" for name, meaning in rows.items())
    text += "\n" + "\n".join(["| | meaning |", "|---|---|", *lines]) + "\n" if rows else ""
    commands = (f"# {meaning}\nagenttrain {words}" for words, meaning in verb.examples.items())
    return text + "\n```text\n" + "\n".join(commands) + "\n```\n"


def arguments(parser: VerbParser) -> dict[str, str]:
    """Map the arguments of a verb to their meanings."""
    return {str(action.metavar): str(action.help) for action in parser.positionals}
