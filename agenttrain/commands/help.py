"""The texts of `--help`, and the page docs/reference/verbs.md, made of the verbs' parsers."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from agenttrain.commands.verb import VERBS, Verb, VerbParser, option_rows
from agenttrain.commands.verbs import DECLARED, DEFAULT
from agenttrain.settings.resumable import RESUMABLE
from agenttrain.utils.files import conf_folder, list_groups

HELP = Path(__file__).with_name("help.txt")
INDENT = " " * 31


def help_text() -> str:
    """Return the text of `agenttrain --help`."""
    conf = conf_folder()
    groups = list_groups(conf)
    width = max(map(len, groups))
    options = option_rows(DECLARED[DEFAULT].parser()).items()
    return (
        HELP.read_text(encoding="utf-8")
        .format(
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
        )
        .rstrip()
    )


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
    if rows:
        lines = (f"| `{name}` | {meaning} |" for name, meaning in rows.items())
        text += "\n" + "\n".join(["| | meaning |", "|---|---|", *lines]) + "\n"
    commands = (f"# {meaning}\nagenttrain {words}" for words, meaning in verb.examples.items())
    return text + "\n```text\n" + "\n".join(commands) + "\n```\n"


def arguments(parser: VerbParser) -> dict[str, str]:
    """Map the arguments of a verb to their meanings."""
    return {str(action.metavar): str(action.help) for action in parser.positionals}
